"""Benchmarks that take a cluster."""
