"""Reads a JSON file into a validated ``Config``."""

from .load import load_config as load_config
from .schema import Config as Config
