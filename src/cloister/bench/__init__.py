"""Workloads from real traces, a load generator, reports and plots."""
