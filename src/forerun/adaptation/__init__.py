"""Drafters that go on learning while they serve. The engine finds this package by its name, where it is asked to."""

from __future__ import annotations

from forerun.adaptation.adaptation import Adaptation as Adaptation
