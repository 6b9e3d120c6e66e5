"""Clusters that real engines start: Slurm and MPI."""
