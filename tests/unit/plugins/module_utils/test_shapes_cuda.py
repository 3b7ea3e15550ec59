# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gates in CUDA sources. What a preprocessor condition means is decided by a preprocessor: pcpp."""

from __future__ import annotations

import io
import re

import pcpp
import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import BY_ID
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import KNOWN_CAPABILITIES
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Host
from ansible_collections.blackwell.inference.plugins.module_utils._shapes import ShapeError
from ansible_collections.blackwell.inference.plugins.module_utils._shapes_cuda import ArchGuards, Companion, DeviceCode, RunTimeCheck
from ansible_collections.blackwell.inference.plugins.module_utils._source import Text
from ansible_collections.blackwell.inference.tests.unit.conftest import SOURCES
from ansible_collections.blackwell.inference.tests.unit.jit_stand_in import shared_library
from hypothesis import given
from hypothesis import strategies as st

SM120 = (12, 0)
SET = ["flashinfer.trtllm_allreduce.guards", "flashinfer.trtllm_allreduce.lamport_stride", "flashinfer.trtllm_allreduce.cluster_size"]
KERNELS, LAUNCHER = "flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh", "flashinfer/data/csrc/trtllm_allreduce.cu"
PREBUILT = "flashinfer_jit_cache/jit_cache/trtllm_comm/trtllm_comm.so"


def answers(shape, content: bytes) -> dict:
    reading = shape.read(Text(content))
    return {known: reading.answer(Host(known)) for known in KNOWN_CAPABILITIES} if reading else {}


def opened(shape, content: bytes) -> bytes:
    source = Text(content)
    return source.edited(shape.read(source).open_for(SM120))


def compiled(text: str, capability: tuple[int, int]) -> bool:
    """Whether a preprocessor that runs for this GPU lets every body through."""
    preprocessor, output = pcpp.Preprocessor(), io.StringIO()
    preprocessor.define(f"__CUDA_ARCH__ {capability[0] * 100 + capability[1] * 10}")
    preprocessor.parse(text)
    preprocessor.write(output)
    return output.getvalue().count("body") == text.count("body")


# Preprocessor conditions

_BLANK = st.sampled_from(["", " ", "\t", " \\\n  ", " /* < 1200 */ "])
_VALUES = st.sampled_from([700, 800, 890, 900, 1000, 1030, 1100, 1200, 1210])


@st.composite
def conditions(draw, depth: int = 2) -> str:
    blank = draw(_BLANK)
    if not depth or draw(st.booleans()):
        operator = draw(st.sampled_from([">=", "<", "<=", ">", "==", "!="]))
        bound = f"__CUDA_ARCH__{blank}{operator}{blank}{draw(_VALUES)}"
        return draw(st.sampled_from([bound, f"({bound})", "defined(__CUDA_ARCH__)", f"defined{blank or ' '}__CUDA_ARCH__", f"!({bound})"]))
    operator = draw(st.sampled_from(["&&", "||"]))
    whole = f"{draw(conditions(depth - 1))}{blank}{operator} {draw(conditions(depth - 1))}"
    return f"({whole})" if draw(st.booleans()) else f"({whole}) && __CUDA_ARCH__ >= 900"


@given(st.lists(conditions(), min_size=1, max_size=3), st.sampled_from(["\n", "\r\n"]))
def test_guards_are_read_as_they_are_compiled_and_opened_exactly(found, newline):
    text = "// #if __CUDA_ARCH__ < 800\n" + "".join(f"  #  if {condition} // {{\nbody\n#endif\n" for condition in found)
    content = text.replace("\n", newline).encode()
    truth = {known: compiled(text, known) for known in KNOWN_CAPABILITIES}
    before = answers(ArchGuards(), content)
    assert all(before.get(known) in (None, truth[known]) for known in truth), (before, truth)
    if before.get(SM120) is not False:
        return
    try:
        edited = opened(ArchGuards(), content)
    except ShapeError:
        return
    after = answers(ArchGuards(), edited)
    # Where the bound is not all that keeps 12.0 out, this is what compose() sees and refuses.
    assert after == {known: compiled(edited.decode().replace(newline, "\n"), known) for known in KNOWN_CAPABILITIES}
    assert edited.count(newline.encode()) == content.count(newline.encode()) and re.sub(
        rb"[()]| \|\| __CUDA_ARCH__ == 1200", b"", edited
    ) == re.sub(rb"[()]", b"", content)


def test_as_released_all_guards_open_for_12_0_and_for_nothing_else():
    content = SOURCES[KERNELS].encode()
    before, after = answers(ArchGuards(), content), answers(ArchGuards(), opened(ArchGuards(), content))
    assert [known for known in after if after[known] is not before[known]] == [SM120] and after[SM120] and not after[(12, 1)]
    assert ArchGuards().read(Text(content)).expression == "#if (defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900) && (__CUDA_ARCH__ < 1200))"
    assert b"(__CUDA_ARCH__ < 1200 || __CUDA_ARCH__ == 1200)" in opened(ArchGuards(), content)


@pytest.mark.parametrize(
    "text",
    [
        "#if __CUDA_ARCH__ < 1000\n#elif __CUDA_ARCH__ < 1200\n#endif\n",
        "#ifdef __CUDA_ARCH__\n#endif\n",
    ],
)
def test_other_directives_are_not_recognised(text):
    with pytest.raises(ShapeError):
        ArchGuards().read(Text(text.encode()))


def test_what_an_unknown_macro_decides_is_undecided():
    assert answers(ArchGuards(), b"#if __CUDA_ARCH__ >= 900 && CUTLASS_HAS_IT\n#endif\n")[SM120] is None
    assert answers(ArchGuards(), b"#if __CUDA_ARCH__ < 900 && CUTLASS_HAS_IT\n#endif\n")[SM120] is False


def test_without_guards_there_is_no_gate():
    assert ArchGuards().read(Text(b'// __CUDA_ARCH__ < 1200\nauto text = "\\\n#if __CUDA_ARCH__ < 1200\\\n";\n')) is None


@pytest.mark.parametrize("condition", ["__CUDA_ARCH__ < 1200 && __CUDA_ARCH__ <= 1100", "__CUDA_ARCH__ == 900"])
def test_where_no_single_bound_keeps_it_shut_nothing_is_edited(condition):
    with pytest.raises(ShapeError):
        opened(ArchGuards(), f"#if {condition}\n#endif\n".encode())


# Statements beside them

STRIDE = Companion("pack", replaces="[i + tp_size", by="[i + MAX_RANKS_PER_NODE", also_open="stride(")
_GAP = st.sampled_from(["", " ", "\n", "  // [i + tp_size\n", " /* [i + MAX_RANKS_PER_NODE */ "])


@given(st.lists(_GAP, min_size=6, max_size=6))
def test_a_statement_is_replaced_in_any_layout_and_nowhere_else(gaps):
    one, two, three, four, five, six = gaps
    decoy = 'void pack(int);\nvoid other() { p[i + tp_size]; }\nauto text = "void pack() { [i + tp_size";\n'
    body = f"p[{one}i{two}+{three}tp_size]{four}= 1; if (a) {{ p[i + tp_size * 2] = 2; }}{five}"
    content = f"{decoy}void pack({six}int tp_size) {{{body}}}\n{decoy}".encode()
    assert set(answers(STRIDE, content).values()) == {False}
    edited = opened(STRIDE, content).decode()
    assert set(answers(STRIDE, edited.encode()).values()) == {True}
    assert edited.startswith(decoy) and edited.endswith(f"{five}}}\n{decoy}")
    assert edited.count("p[i + MAX_RANKS_PER_NODE]") == 1 and edited.count("p[i + MAX_RANKS_PER_NODE * 2]") == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("void pack() { p[i + tp_size] = p[i + MAX_RANKS_PER_NODE]; }", "has both"),
        ("void pack() { p[i + tp_size_of] = 1; }", "has neither"),
        ("void pack() { p[i + tp_size] } void pack(int) { }", "2 definitions"),
    ],
)
def test_a_statement_in_another_form_is_not_recognised(text, found):
    with pytest.raises(ShapeError, match=found):
        STRIDE.read(Text(text.encode()))


def test_a_later_release_may_say_it_otherwise():
    assert set(answers(STRIDE, b"void pack() { p[stride(i)] = 1; }").values()) == {True}
    assert STRIDE.read(Text(b"void packed() { p[i + tp_size]; }")) is None


# Checks at run time, and libraries


def test_a_check_at_run_time_is_evaluated():
    check = RunTimeCheck("FLASHINFER_CHECK", "mSM")
    text = '// FLASHINFER_CHECK(mSM == 1)\nFLASHINFER_CHECK(ok, "mSM");\nFLASHINFER_CHECK((mSM == kSM_100) || mSM == kSM_103, "no", mSM);\n'
    assert [known for known, answer in answers(check, text.encode()).items() if answer] == [(10, 0), (10, 3)]
    assert check.read(Text(text.encode())).line == 3
    assert answers(check, b"FLASHINFER_CHECK(mSM == newest())")[SM120] is None
    assert check.read(Text(b"FLASHINFER_CHECK(other)")) is None
    with pytest.raises(ShapeError, match="2 calls"):
        check.read(Text(b"FLASHINFER_CHECK(mSM > 1); FLASHINFER_CHECK(mSM > 2);"))


def test_a_library_is_open_for_what_it_holds_code_for():
    answer = answers(DeviceCode(), shared_library("sm_90a", "sm_120f"))
    assert [known for known in answer if answer[known]] == [(9, 0), (12, 0), (12, 1)]
    assert DeviceCode().read(Text(shared_library("sm_90a"))).expression == "code for sm_90a"
    with pytest.raises(ShapeError, match="not a whole ELF file"):
        DeviceCode().read(Text(shared_library("sm_90a")[:200]))


# The optional set, opened and restored


def test_the_optional_set_is_left_closed_until_it_is_asked_for(venv):
    result = venv.gate()
    assert {result.verdicts()[gate] for gate in SET} == {"not_admitted"} and result["complete"] and result["half_open"] == []
    assert all("when that is asked for" in row["reason"] for row in result["gates"] if row["id"] in SET)
    assert venv.path(KERNELS).read_text() == SOURCES[KERNELS] and venv.path(LAUNCHER).read_text() == SOURCES[LAUNCHER]


def test_asked_for_it_opens_as_a_whole_stays_open_and_is_restored(venv):
    result = venv.gate(optional=True)
    assert {result.verdicts()[gate] for gate in SET} == {"opened"} and result["stale_jit_modules"] == ["trtllm_comm"]
    assert {KERNELS, LAUNCHER} < {name for name, content in venv.sources().items() if content != SOURCES[name].encode()}
    again = venv.gate()
    assert not again["changed"] and {again.verdicts()[gate] for gate in SET} == {"opened"}
    assert venv.gate("restored")["changed"] and venv.is_pristine()


@pytest.mark.parametrize("gate", SET)
def test_a_part_of_it_is_refused(venv, gate):
    with pytest.raises(
        InferenceError, match=f"^gates: {gate} would be open and flashinfer.trtllm_allreduce.* closed; expected both or neither"
    ):
        venv.gate(gates=[gate])
    assert venv.is_pristine()


def test_a_part_of_it_is_not_restored_under_the_rest(venv):
    venv.gate(gates=SET)
    with pytest.raises(InferenceError, match="both or neither"):
        venv.gate("restored", gates=SET[:1])
    assert venv.gate("restored", gates=SET)["changed"] and venv.is_pristine()


@pytest.mark.parametrize("capability", ["9.0", "10.0", "12.1"])
def test_it_is_opened_for_12_0_only(venv, capability):
    assert not venv.gate(optional=True, compute_capability=[capability])["changed"] and venv.is_pristine()


def test_a_prebuilt_library_without_the_code_is_told(venv):
    path = venv.path(PREBUILT)
    path.parent.mkdir(parents=True)
    path.write_bytes(shared_library("sm_90a", "sm_100a"))
    (path.parents[2] / "__init__.py").touch()
    result = venv.gate()
    row = next(row for row in result["gates"] if row["id"] == "flashinfer.trtllm_comm.prebuilt")
    assert (row["verdict"], row["file"], row["expression"]) == ("not_admitted", PREBUILT, "code for sm_100a, sm_90a")
    assert "set it aside" in row["reason"]
    assert result["half_open"] == [
        "flashinfer.trtllm_comm.majors is opened, and flashinfer.trtllm_comm.prebuilt, which it needs, is not_admitted"
    ]
    path.write_bytes(shared_library("sm_90a", "sm_120f"))
    again = venv.gate()
    assert again.verdicts()["flashinfer.trtllm_comm.prebuilt"] == "open" and again["half_open"] == []


def test_guards_that_were_opened_by_hand_alone_are_told(venv):
    path = venv.path(KERNELS)
    path.write_text(path.read_text().replace(" && (__CUDA_ARCH__ < 1200)", ""))
    told = venv.gate(check=True)["half_open"]
    assert told and all(sentence.startswith(f"{SET[0]} is open, and {gate}") for sentence, gate in zip(told, SET[1:]))


def test_nothing_in_the_optional_set_is_needed_by_fusion():
    assert not any(set(gate.needs) & set(SET) for gate in BY_ID.values() if not gate.optional)
