"""The version that every process of a cluster must share."""

from __future__ import annotations

SOFTWARE = "0.1.0"
