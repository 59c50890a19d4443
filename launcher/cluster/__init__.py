"""Start ranks on several hosts: DeepSpeed's launcher, mpirun and SLURM."""
