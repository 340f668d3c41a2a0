"""Measuring an engine: workloads, clients in process and over HTTP, figures beside their floor."""
