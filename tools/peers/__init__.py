"""The parts of tools/bench_peers.py: models for every engine, worker processes, measurements, tables."""
