"""``python -m lab.given_model OUT``"""

import sys

from .study import main

sys.exit(main())
