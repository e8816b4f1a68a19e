"""Puts the project's files on the path: the tests import them as a user's script would."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
