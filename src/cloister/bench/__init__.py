"""Workloads from real traces, a load generator, measurements of engines and kernels, the roofline model, reports and plots."""
