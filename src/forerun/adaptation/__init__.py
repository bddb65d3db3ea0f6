"""Drafters that go on learning while they serve. The facade hands this package to the engine."""

from __future__ import annotations

from forerun.adaptation.adaptation import Adaptation as Adaptation
