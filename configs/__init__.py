"""Configurations of runs, as JSON files, and scripts for clusters. This package only makes them
part of an installation.
"""
