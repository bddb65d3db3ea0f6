"""The fixtures of tests/wheels.py."""

from wheels import home as home, wheel as wheel
