"""Which configurations, scripts and models of DeepSpeed's users work, as docs/deepspeed.md says."""
