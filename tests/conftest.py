"""What holds for every test: none of them reaches a package index but one of its own."""

import os

os.environ["PIP_NO_INDEX"] = "1"
