"""Puts the modules that the tests in this folder share on the import path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
