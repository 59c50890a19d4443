"""Trainers of other projects: Accelerate, the Trainer of transformers, and Lightning.

These import a package that may be missing, so each has a module of its own.
"""

from .accelerate import install as install
