"""The fixtures of tests/helpers/programs/wheels.py."""

from wheels import home as home, wheel as wheel
