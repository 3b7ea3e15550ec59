# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters for the report on what was measured; each is described in the YAML file of its name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ansible_collections.blackwell.inference.plugins.module_utils._decision import decide
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.plugin_utils import _plots


def proof_decision(record: Any) -> dict[str, Any]:
    """Return what followed from a record of fusion_proof when it was measured."""
    if not isinstance(record, dict) or "probe" not in record:
        raise InferenceError("proof_decision", "this is no record of fusion_proof", "the content of proofs/NAME.json")
    decision = decide(record["probe"], benchmark=record.get("benchmark"))
    return {**decision._asdict(), "candidates": {name: verdict._asdict() for name, verdict in decision.candidates.items()}}


def plotted(name: str, plot: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a filter that draws, and says in one line why it cannot."""

    def draw(measured: Any) -> str:
        try:
            return plot(measured)
        except ImportError:
            found = f"matplotlib is not installed for {sys.executable}"
            raise InferenceError(name, found, "it on the controller", f"Install it: {sys.executable} -m pip install matplotlib") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InferenceError(name, f"it cannot be drawn ({error!s})", "what the collection's modules keep") from None

    return draw


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "proof_decision": proof_decision,
            "probe_plot": plotted("probe_plot", _plots.probe_plot),
            "benchmark_plot": plotted("benchmark_plot", _plots.benchmark_plot),
        }
