import msgpack
import pytest

from tenplexfs.errors import ConflictError, InvalidError
from tenplexfs.formats import frames


def test_there_and_back():
    frame = frames.encode({"id": 3, "op": "hello", "data": b"x"})
    assert frames.body_bytes(frame[: frames.PREFIX_BYTES]) == len(frame) - frames.PREFIX_BYTES
    assert frames.decode(frame[frames.PREFIX_BYTES :]) == {"v": 1, "id": 3, "op": "hello", "data": b"x"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb({"v": 2, "id": 1}),
        msgpack.packb({"v": 1, "id": "x"}),
        b"\x81",
    ],
)
def test_what_is_no_message_is_refused(body):
    with pytest.raises(InvalidError, match="frame"):
        frames.decode(body)


def test_frames_have_a_limit():
    with pytest.raises(InvalidError, match="at most 67108864"):
        frames.body_bytes(b"\xff\xff\xff\xff")
    with pytest.raises(InvalidError, match="at most 67108864"):
        frames.encode({"id": 1, "data": bytes(frames.MAX_FRAME_BYTES)})


def test_errors_travel_with_code_message_and_plain_details():
    error = ConflictError("moved", generation=3, odd=object(), names=["a"])
    message = frames.decode(frames.encode(frames.failure(1, error))[frames.PREFIX_BYTES :])
    with pytest.raises(ConflictError, match="moved") as caught:
        frames.outcome(message)
    assert caught.value.details == {"generation": 3, "names": ["a"]}
    assert frames.outcome(frames.answer(1, {"a": 1})) == {"a": 1}
    with pytest.raises(InvalidError, match="neither"):
        frames.outcome({"id": 1})
