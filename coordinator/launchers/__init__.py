"""Starts clusters on engines that own the machines: Slurm, MPI, Kubernetes, Ray and Spark."""
