"""The command line: typer and rich. The only place that prints."""
