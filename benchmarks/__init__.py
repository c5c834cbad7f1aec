"""headwater beside its peers: `python -m benchmarks`, and smaller measurements as scripts of their own."""
