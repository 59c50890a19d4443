"""Starts the ranks of a run on several hosts, through DeepSpeed's launcher, mpirun or SLURM."""
