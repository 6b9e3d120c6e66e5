"""Clusters that real engines start: Slurm, MPI and Ray."""
