"""Framing: the stream may be cut anywhere; an invalid frame is refused at once."""

from __future__ import annotations

import socket
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.runtime.errors import FrameInvalid, LengthInvalid, LinkClosed
from holdfast.runtime.link.messages import MAX_FRAME_BYTES, frame, receive_one, report_reader, verb_reader
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import (
    Close,
    Extend,
    Finish,
    Fork,
    Generate,
    Locate,
    Open,
    Row,
    Sampling,
    Statistics,
    Step,
    Stop,
    TokenLimits,
    Truncate,
    Work,
)

ids = st.integers(0, 2**32 - 1)
tokens = st.lists(ids, max_size=40)
sampling = st.builds(Sampling, st.floats(0, 2), ids, st.floats(0, 1), seed=st.integers(0, 2**63 - 1))
verbs = st.one_of(
    st.builds(Open, ids, ids, st.binary(max_size=20), tokens),
    st.builds(Extend, ids, ids, tokens),
    st.builds(Truncate, ids, ids, ids, ids),
    st.builds(Generate, ids, ids, sampling, st.builds(TokenLimits, ids, st.tuples(ids, ids)), ids),
    st.builds(Stop, ids, ids),
    st.builds(Fork, ids, ids, tokens, st.none() | ids),
    st.builds(Close, ids, ids, st.booleans()),
    st.builds(Locate, ids, st.none() | ids, st.binary(max_size=20), tokens),
    st.builds(Statistics, ids),
)
rows = st.builds(
    Row,
    ids,
    ids,
    tokens,
    ids,
    st.none() | st.sampled_from(Finish),
    st.none() | st.builds(Work, ids, ids, ids, ids),
    st.none() | st.text(max_size=20),
)


@given(st.lists(verbs, max_size=8), st.data())
def test_verbs_are_decoded_however_the_stream_is_cut(sent: list, data: st.DataObject) -> None:
    stream = b"".join(map(frame, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader, came = verb_reader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        came += reader.feed(stream[start:end])
    assert came == sent
    assert list(reader.feed(frame(Stop(1, 2)))) == [Stop(1, 2)]


@given(st.lists(rows, max_size=5))
def test_steps_are_decoded_as_they_were_encoded(sent: list[Row]) -> None:
    assert list(report_reader().feed(frame(Step(1, sent)))) == [Step(1, sent)]


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_incomplete(garbage: bytes) -> None:
    reader = verb_reader()
    try:
        for verb in reader.feed(garbage):
            assert frame(verb)  # by chance a verb
    except FrameInvalid:
        return


def test_valid_messages_before_garbage_are_returned() -> None:
    came = verb_reader().feed(frame(Stop(1, 2)) + b"\x03\0\0\0\xc1\xc1\xc1")
    assert next(came) == Stop(1, 2)
    with pytest.raises(FrameInvalid):
        next(came)


def test_an_oversized_length_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(FrameInvalid, match=str(MAX_FRAME_BYTES + 1)):
        list(verb_reader().feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(FrameInvalid):
        list(verb_reader().feed(bytes(4)))


def test_deep_nesting_is_refused() -> None:
    deep = b"\x91" * 100_000
    with pytest.raises(FrameInvalid):
        list(verb_reader().feed(struct.pack("<I", len(deep)) + deep))


@pytest.mark.parametrize(
    "body", [["open", 1], ["nothing", 1], ["stop", "one", 2], {"request": 1}, 7, ["stop", 1, None]], ids=str
)
def test_wrong_schema_is_refused(body: object) -> None:
    data = msgspec.msgpack.encode(body)
    with pytest.raises(FrameInvalid):
        list(verb_reader().feed(struct.pack("<I", len(data)) + data))


def test_a_message_too_large_to_read_is_not_sent() -> None:
    with pytest.raises(LengthInvalid, match="Extend"):
        frame(Extend(1, 1, [2**31] * (MAX_FRAME_BYTES // 5 + 1)))


def test_an_integer_over_64_bits_is_not_sent() -> None:
    with pytest.raises(LengthInvalid):
        frame(Extend(1, 1, [2**64]))


def test_receive_one_reads_no_byte_beyond_the_frame() -> None:
    near, far = socket.socketpair()
    with near, far:
        settings = EngineSettings(model="pocket", blocks=7)
        near.sendall(frame(settings) + b"rest")
        assert receive_one(far, EngineSettings) == settings
        assert far.recv(100) == b"rest"


def test_a_stream_that_ends_in_a_frame_is_closed() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(frame(EngineSettings(model="pocket"))[:-1])
        near.close()
        with pytest.raises(LinkClosed):
            receive_one(far, EngineSettings)
