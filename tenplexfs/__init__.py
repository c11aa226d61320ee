"""Keeps the state of a training job outside the job, and changes its parallelism while the job lives."""
