"""Executes plans; owns the namespace and the transactions. Async, on trio."""
