from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import trio

from tenplexfs.core.parallelizers import Answer, Command, Proposal, Table
from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import InvalidError, TimedOutError
from tenplexfs.formats import parallelizer_json
from tenplexfs.runtime import parallelizing
from tenplexfs.runtime.parallelizing import ask_program, decide, question
from tests.runtime.cluster import layout_json

HERE = NodeName("node0")
LAYOUT = layout_json()


def ask(script: str, text: bytes = b"{}", timeout_s: float = 10.0) -> bytes:
    return trio.run(ask_program, Command(("/bin/sh", "-c", script), timeout_s), text)


def test_a_program_reads_and_writes():
    assert ask("cat", b"x" * 300_000) == b"x" * 300_000
    assert ask("echo '{}'", b"x" * 300_000) == b"{}\n"  # it does not read


def test_a_program_that_fails_says_why():
    with pytest.raises(InvalidError, match=r"^parallelizer: /bin/sh: ended with status 3: no such model$"):
        ask("echo first >&2; echo no such model >&2; exit 3")
    with pytest.raises(InvalidError, match=r"ended with status -9$"):
        ask("kill -9 $$")
    with pytest.raises(InvalidError, match="/no/such: cannot be run: "):
        trio.run(ask_program, Command(("/no/such",)), b"")


def test_a_program_that_takes_too_long_is_killed_with_its_children(tmp_path: Path):
    pids = tmp_path / "pids"
    with pytest.raises(TimedOutError, match=r"no answer within 0\.5 s: working"):
        ask(f"echo working >&2; sleep 60 & echo $! > {pids}; wait", timeout_s=0.5)
    child = int(pids.read_text())
    end = time.monotonic() + 10
    while is_alive(child):
        assert time.monotonic() < end


@pytest.mark.parametrize("leaves", ["sleep 60", "sleep 60 >/dev/null", "setsid sleep 60"])
def test_a_program_that_has_answered_is_not_waited_for_by_what_it_leaves(tmp_path: Path, leaves: str):
    pids = tmp_path / "pids"
    assert ask(f"{leaves} & echo $! > {pids}; echo '{{}}'; exit 0", timeout_s=10) == b"{}\n"
    if "setsid" in leaves:
        os.kill(int(pids.read_text()), signal.SIGKILL)


def test_what_a_program_says_last_is_shown_without_what_no_terminal_shows():
    with pytest.raises(InvalidError, match=r"ended with status 1: no \[31mmodel$"):
        ask(r"printf 'no \033[31mmo\000del\n' >&2; exit 1")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parallelizing, "MAX_ANSWER_BYTES", 100_000)
    assert parallelizer_json.MAX_ANSWER_BYTES > 100_000
    with pytest.raises(InvalidError, match="wrote more than 100000 bytes"):
        ask("cat /dev/zero")


def test_nothing_is_left_open():
    before = len([*Path("/proc/self/fd").iterdir()])
    ask("true")
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_what_is_already_so_stays():
    for asked in (None, Table({4: {"pp": 2, "tp": 2}})):
        decision = decide(asked, LAYOUT, {"node0": 2, "node1": 3}, HERE, has_state=True)
        assert decision.target is not None and decision.target.layout_json == LAYOUT


def test_the_same_mesh_on_other_nodes():
    decision = decide(None, LAYOUT, {"node2": 4}, HERE, has_state=True)
    assert decision.target is not None and decision.target.nodes == {"node2": 4}
    with pytest.raises(InvalidError, match="3 devices for 4 ranks, and the job has no parallelizer"):
        decide(None, LAYOUT, {"node2": 3}, HERE, has_state=True)


def test_the_first_proposal_that_makes_a_layout_is_taken():
    answer = Answer((Proposal({"tp": 3, "pp": 1}), Proposal({"tp": 1, "pp": 4}), Proposal({"tp": 2})))
    decision = decide(answer, LAYOUT, {"node0": 4}, HERE, has_state=True)
    assert decision.target is not None and decision.target.mesh == {"tp": 1, "pp": 4}
    with pytest.raises(InvalidError, match=r"its layout is refused: .* 3 ways"):
        decide(Answer(answer.proposals[:1]), LAYOUT, {"node0": 4}, HERE, has_state=True)
    assert decide(Answer((), "why"), LAYOUT, {"node0": 4}, HERE, has_state=True).why == "why"


def test_a_program_may_give_a_whole_layout():
    text = layout_json(nodes={"node0": [0, 1, 2, 3]})
    decision = decide(Answer((Proposal({}, (), text),)), LAYOUT, {"node0": 4}, HERE, has_state=True)
    assert decision.target is not None and decision.target.layout_json == text
    with pytest.raises(InvalidError, match="its layout is refused"):
        decide(Answer((Proposal({}, (), b"[1]"),)), LAYOUT, {"node0": 4}, HERE, has_state=True)


def test_what_a_program_is_told():
    told = json.loads(question("gpt", LAYOUT, {"node0": 4}, None))
    assert (
        told["mesh"] == {"pp": 2, "tp": 2} and told["layout"] == json.loads(LAYOUT) and told["step"] is None
    )


def test_what_shares_a_node_goes_on_sharing_one():
    def together(nodes: dict[str, list[int]], devices: dict[str, int]) -> tuple[str, ...] | None:
        target = decide(None, layout_json(nodes=nodes), devices, HERE, has_state=True).target
        assert target is not None
        return target.together

    by_stage = {"node0": [0, 1], "node1": [2, 3]}
    assert together(by_stage, {"a": 2, "b": 2}) == ("tp",)
    assert together(by_stage, {"a": 3, "b": 1}) == ()
    assert together({"node0": [0, 2], "node1": [1, 3]}, {"a": 2, "b": 2}) == ("pp",)
    assert together({"node0": [0, 1, 2, 3]}, {"a": 4}) == ("pp", "tp")
