"""``python -m lab.facts OUT``"""

import sys

from .study import main

sys.exit(main())
