"""Whatever messages come over gRPC, nobody is told INTERNAL or UNKNOWN, and the next plain call works."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.model_files import ModelFiles
from baton.v1 import serving_pb2, serving_pb2_grpc
from tests.router.router_rig import Rig, request, running_rig

Result = TypeVar("Result")

SERVING = serving_pb2.DESCRIPTOR.services_by_name["Serving"]
DEADLINE_S = 5.0  # what an answer may take; beyond it DEADLINE_EXCEEDED, which is an answer too
# Words that get further than random ones: roles, classes, the model, labels that several calls share.
WORDS = st.sampled_from(
    ["", "user", "assistant", "system", "interactive", "batch", "tiny", "r1", "s", "<|im_end|>", "é\u0000\n"]
)
INTERVALS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def values(field: FieldDescriptor) -> st.SearchStrategy[object]:
    """One value of a field's type, small or at its edge."""
    kind = field.cpp_type
    if kind in INTERVALS:
        low, high = INTERVALS[kind]
        return st.integers(0, 9) | st.sampled_from([low, high]) | st.integers(low, high)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.sampled_from([0.0, 0.5, 1.0, 2.0]) | st.floats(width=32)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return st.integers(0, 9)
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        assert field.message_type is not None
        return messages(field.message_type)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    if field.name in ("prompt", "content"):
        return st.text(st.characters(codec="utf-8"), max_size=50)
    return WORDS | st.text(st.characters(codec="utf-8"), max_size=20)


@st.composite
def messages(draw: Callable[..., object], descriptor: Descriptor) -> Message:
    """A message with some of its fields set; of a oneof the last one drawn."""
    made = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(st.integers(0, 3)):  # three of four stay away: most combinations are refused for one reason
            continue
        if field.is_repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(draw, made, field)
        elif field.is_repeated:
            getattr(made, field.name).extend(draw(st.lists(values(field), max_size=3)))
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(draw(values(field)))
        else:
            setattr(made, field.name, draw(values(field)))
    return made


def _fill_map(draw: Callable[..., object], made: Message, field: FieldDescriptor) -> None:
    assert field.message_type is not None
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    pairs = draw(st.dictionaries(values(key), values(value), max_size=3))
    assert isinstance(pairs, dict)
    for drawn_key, drawn_value in pairs.items():
        getattr(made, field.name)[drawn_key] = drawn_value


class RunningRig:
    """A rig on an event loop of its own thread, since hypothesis draws examples in plain functions."""

    def __init__(self, files: ModelFiles) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._rig: AbstractAsyncContextManager[Rig] = running_rig(files)
        self.rig = self.run(self._rig.__aenter__())
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.rig.front_end.grpc_port}")

    def run(self, work: Coroutine[None, None, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self.channel.close()
        self.run(self._rig.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def running(files: ModelFiles) -> Iterator[RunningRig]:
    running = RunningRig(files)
    yield running
    running.close()


def mend(request: serving_pb2.GenerateRequest) -> None:
    """Take away what would refuse it first, so that the rest of it is looked at, and small, so that it ends soon."""
    request.model = request.slo.class_name = ""
    request.ClearField("resumable")
    if request.WhichOneof("input") != "chat" or not request.chat.messages:
        request.prompt = "hello"
    for message in request.chat.messages:
        message.role = "user"
    request.sampling.max_tokens = 3
    request.sampling.n = min(abs(request.sampling.n), 2) or 1


def outcome(channel: grpc.Channel, method: MethodDescriptor, sent: list[Message]) -> grpc.StatusCode:
    """Call it with these messages, read all that comes, and return how it ended."""
    path = f"/{SERVING.full_name}/{method.name}"
    kinds = GetMessageClass(method.input_type).SerializeToString, GetMessageClass(method.output_type).FromString
    if not method.server_streaming:
        return channel.unary_unary(path, *kinds).future(sent[0], timeout=DEADLINE_S).code()
    if method.client_streaming:
        call = channel.stream_stream(path, *kinds)(iter(sent), timeout=DEADLINE_S)
    else:
        call = channel.unary_stream(path, *kinds)(sent[0], timeout=DEADLINE_S)
    with contextlib.suppress(grpc.RpcError):
        list(call)
    return call.code()


# Resume asks the workers and waits for them: 0.8 s
EXAMPLES = {"Generate": 200, "Abort": 40, "Session": 60, "Resume": 6}


@pytest.mark.parametrize("method", list(SERVING.methods), ids=lambda method: method.name)
def test_no_message_gets_internal_or_unknown(running: RunningRig, method: MethodDescriptor) -> None:
    seen: Counter[grpc.StatusCode] = Counter()

    @settings(
        max_examples=EXAMPLES.get(method.name, 3), deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(
        st.lists(messages(method.input_type), min_size=1, max_size=4 if method.client_streaming else 1), st.booleans()
    )
    def check(sent: list[Message], mended: bool) -> None:
        for message in sent if mended else []:
            if isinstance(message, serving_pb2.GenerateRequest):
                mend(message)
            if isinstance(message, serving_pb2.SessionCall) and message.HasField("start"):
                mend(message.start.generate)
        status = outcome(running.channel, method, sent)
        seen[status] += 1
        assert status not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)

    check()
    plain = serving_pb2.GenerateRequest(prompt="hello", sampling=serving_pb2.Sampling(max_tokens=3))
    *_, last = serving_pb2_grpc.ServingStub(running.channel).Generate(plain, timeout=30)
    assert last.done.usage.completion_tokens == 3
    if method.name in ("Generate", "Session"):
        assert seen[grpc.StatusCode.OK], "some got as far as an answer"
    running.run(running.rig.idle())


NO_MESSAGE, NO_TEXT = b"\xff\xff\xff", b"\x0a\x02\xff\xfe"  # the second where field 1 is a text


@pytest.mark.parametrize(
    ("name", "data"),
    [*((method.name, NO_MESSAGE) for method in SERVING.methods), ("Generate", NO_TEXT), ("Abort", NO_TEXT)],
)
async def test_bytes_that_are_no_message_are_the_client_s_fault(rig: Rig, name: str, data: bytes) -> None:
    method, path = SERVING.methods_by_name[name], f"/{SERVING.full_name}/{name}"
    call: grpc.aio.StreamStreamCall[bytes, bytes] | grpc.aio.UnaryStreamCall[bytes, bytes]
    if method.client_streaming:  # without serializers: bytes
        call = rig.channel.stream_stream(path, None, None)(iter([data]))
    else:
        call = rig.channel.unary_stream(path, None, None)(data)
    events = []
    with contextlib.suppress(grpc.aio.AioRpcError):  # its code is what is asked for
        async for event in call:
            events.append(serving_pb2.GenerateResponse.FromString(event).error.code)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert events == ["invalid_request"] * (name in ("Generate", "Resume"))
    assert (await rig.generate(request(max_tokens=2))).done is not None
