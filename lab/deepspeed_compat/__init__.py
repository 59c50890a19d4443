"""Counts which configurations, scripts and models of DeepSpeed's users work with SDP."""
