"""Lets the tests of this folder import ``protocol_model``, which is not a test itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
