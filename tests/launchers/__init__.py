"""Clusters that real engines start: Slurm, MPI, Ray and Spark."""
