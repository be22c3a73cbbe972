"""`serve`: one model behind one link, from the first frame to the last.

Three threads: this one opens the model and becomes the turn loop, one reads the link, one renders
and tokenizes. When the link closes the process exits at once, wherever the others are.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from superfluid_compat import numbers
from superfluid_compat.errors import (
    BadFrame,
    DoesNotFit,
    ExitCode,
    Fault,
    InvalidField,
    LinkClosed,
    Overloaded,
    RuntimeBroken,
    SandboxUnreachable,
    SuperfluidError,
)
from superfluid_compat.verdicts import require_number
from superfluid_workerd import sandbox
from superfluid_workerd.adapter import Adapter, OpenRequest, RuntimeDescription
from superfluid_workerd.codec.chat import ChatCodec
from superfluid_workerd.embedding import EmbedRejected
from superfluid_workerd.executor import Executor, Rejected
from superfluid_workerd.grant import granted_context
from superfluid_workerd.intake import Intake
from superfluid_workerd.link.frames import (
    Cancel,
    Description,
    Detokenize,
    Embed,
    Generate,
    Hello,
    Load,
    LoadFailed,
    LoadRecord,
    Ping,
    Ready,
    RequestFailed,
    Shutdown,
    Stage,
    StreamFailed,
    Tokenize,
    ToWorker,
)
from superfluid_workerd.link.refusals import in_words, refusal
from superfluid_workerd.link.transport import Link
from superfluid_workerd.registry import checked_options
from superfluid_workerd.turns import Policy

_PROGRESS_S: Final = 0.05


def serve(adapter: Adapter, descriptor: int) -> int:
    """Serve over the inherited socket; the exit code. May end the process from another thread."""
    try:
        link = Link.adopt(descriptor)
        messages = link.receive()
        _greet(adapter, link, messages)
        if problem := sandbox.reached().problem:
            unreachable = SandboxUnreachable(problem)
            link.send(LoadFailed(error=refusal(unreachable)))
            raise unreachable
        try:
            return _Worker(adapter, link).run(messages)
        except LinkClosed:  # as when the reader hears it first
            return ExitCode.OK
    except SuperfluidError as error:
        print(f"{error.code}: {error.line()}", file=sys.stderr)
        return error.exit_code


def _greet(adapter: Adapter, link: Link, messages: Iterator[ToWorker]) -> None:
    info = adapter.info()
    link.send(Hello(version=info.version, adapter=info.id, pid=os.getpid()))
    theirs = next(messages, None)
    if theirs is None:
        os._exit(ExitCode.OK)
    if not isinstance(theirs, Hello):
        raise BadFrame(f"the first frame was {type(theirs).__name__}, wanted Hello")
    require_number("link", found=theirs.link, wanted=numbers.LINK)


@dataclass(frozen=True, slots=True)
class _Serving:
    """What exists once the model is open."""

    executor: Executor
    intake: Intake


class _Worker:
    def __init__(self, adapter: Adapter, link: Link) -> None:
        self._adapter = adapter
        self._link = link
        self._loads: queue.SimpleQueue[Load] = queue.SimpleQueue()
        self._errands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._serving: _Serving | None = None
        self._loading = False
        self._reported_s = 0.0

    def run(self, messages: Iterator[ToWorker]) -> int:
        threading.Thread(target=self._read, args=(messages,), name="link", daemon=True).start()
        load = self._loads.get()
        try:
            description = self._open(load)
        except SuperfluidError as error:
            self._link.send(LoadFailed(error=refusal(error)))
            return error.exit_code
        threading.Thread(target=self._run_errands, name="intake", daemon=True).start()
        self._link.send(Ready(description=description))
        executor = self._serving_now().executor
        executor.run()
        return ExitCode.OK

    # The load.

    def _open(self, load: Load) -> Description:
        policy = Policy.from_environment(os.environ)
        self._link.send(Stage(stage="probed"))
        try:
            request = self._request(load)
            loaded = self._adapter.open(request)
            described = loaded.runtime.describe()
            context = granted_context(request, described, self._adapter.info().id)
            executor = Executor(
                loaded.runtime, load.lanes, policy, self._link.send, self._adapter.info().id
            )
        except SuperfluidError:
            raise
        except MemoryError as error:
            raise DoesNotFit(f"memory ran out while {load.model} was opened") from error
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            raise RuntimeBroken(
                f"{self._adapter.info().id} failed to open {load.model} with {in_words(error)}",
                fix="report this with the dossier",
            ) from error
        family = loaded.family or loaded.facts.architecture
        codec = ChatCodec(loaded.tokenizer, loaded.template, family)
        intake = Intake(
            loaded.tokenizer,
            codec,
            context,
            described.vocabulary,
            described.generates,
            described.embedding,
        )
        self._serving = _Serving(executor, intake)
        sandbox.loaded()
        # What loading made stays. A full collection looks at all of it, and a turn waits for it.
        gc.collect()
        gc.freeze()
        self._link.send(Stage(stage="warmed"))
        return Description(
            facts=loaded.facts,
            adapter=self._adapter.info().id,
            context=context,
            lanes=load.lanes,
            vocabulary=described.vocabulary,
            template=codec.origin,
            record=_told(loaded.record, described),
            plan=dict(loaded.plan),
            capabilities=msgspec.to_builtins(described),
        )

    def _request(self, load: Load) -> OpenRequest:
        return OpenRequest(
            model=Path(load.model),
            scratch=Path(load.scratch),
            shared=Path(load.shared),
            context=load.context,
            lanes=load.lanes,
            threads=load.threads,
            memory_budget=load.memory_budget,
            options=checked_options(self._adapter, load.options),
            progress=self._progress,
        )

    def _progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._reported_s >= _PROGRESS_S:
            self._reported_s = now
            self._link.send(Stage(stage="mapped", done=done, total=total))

    # The link's thread.

    def _read(self, messages: Iterator[ToWorker]) -> None:
        code: int = ExitCode.FAILURE
        try:
            for message in messages:
                self._dispatch(message)
            code = ExitCode.OK
        except SuperfluidError as error:
            code = error.exit_code
            print(f"{error.code}: {error.line()}", file=sys.stderr)
        except BaseException:  # noqa: BLE001  # recorded; nothing may outlive the link's reader
            traceback.print_exc()
        finally:
            # Also when saying why failed: stderr may have gone with the daemon.
            os._exit(code)

    def _dispatch(self, message: ToWorker) -> None:
        match message:
            case Load():
                if self._loading:
                    raise BadFrame("a second Load came, a worker serves one model")
                self._loading = True
                self._loads.put(message)
            case Shutdown():
                if self._serving is None:
                    os._exit(ExitCode.OK)
                self._serving.executor.post(message)
            case Ping() | Cancel():
                if self._serving is not None:
                    self._serving.executor.post(message)
            case Generate():
                self._generate(message)
            case Embed():
                self._embed(message)
            case Tokenize() | Detokenize():
                self._errands.put(lambda: self._answer(message))
            case Hello():
                raise BadFrame("a second Hello came")

    def _serving_now(self) -> _Serving:
        if self._serving is None:
            raise BadFrame("a request came before the model was ready")
        return self._serving

    def _generate(self, generate: Generate) -> None:
        serving = self._serving_now()
        limit_s = generate.request.deadline_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            choices = None if generate.replay else generate.request.choices
            serving.executor.expect(generate.stream, choices)
        except (InvalidField, Overloaded) as error:
            self._link.send(StreamFailed(stream=generate.stream, error=refusal(error)))
            return
        self._errands.put(lambda: self._prepare(serving, generate, deadline))

    def _embed(self, ask: Embed) -> None:
        serving = self._serving_now()
        try:
            serving.executor.embeddings.expect(ask.request)
        except Overloaded as error:
            self._link.send(RequestFailed(request=ask.request, error=refusal(error)))
            return
        self._errands.put(lambda: self._prepare_embedding(serving, ask))

    # The intake's thread.

    def _run_errands(self) -> None:
        try:
            while True:
                self._errands.get()()
        except BaseException:  # noqa: BLE001  # recorded; a worker without its intake serves nobody
            traceback.print_exc()
        finally:
            os._exit(ExitCode.FAILURE)

    def _prepare(self, serving: _Serving, generate: Generate, deadline: float | None) -> None:
        try:
            serving.executor.post(serving.intake.stream(generate, deadline))
        except SuperfluidError as error:
            serving.executor.post(Rejected(generate.stream, error))
        except Exception as error:  # noqa: BLE001  # recorded; costs this request alone
            serving.executor.post(Rejected(generate.stream, _unexpected(error)))

    def _prepare_embedding(self, serving: _Serving, ask: Embed) -> None:
        try:
            serving.executor.post(serving.intake.embedding_job(ask))
        except SuperfluidError as error:
            serving.executor.post(EmbedRejected(ask.request, error))
        except Exception as error:  # noqa: BLE001  # recorded; costs this request alone
            serving.executor.post(EmbedRejected(ask.request, _unexpected(error)))

    def _answer(self, ask: Tokenize | Detokenize) -> None:
        intake = self._serving_now().intake
        try:
            if isinstance(ask, Tokenize):
                self._link.send(intake.tokenized(ask))
            else:
                self._link.send(intake.detokenized(ask))
        except SuperfluidError as error:
            self._link.send(RequestFailed(request=ask.request, error=refusal(error)))
        except Exception as error:  # noqa: BLE001  # recorded; costs this request alone
            failed = refusal(_unexpected(error))
            self._link.send(RequestFailed(request=ask.request, error=failed))


def _told(record: LoadRecord, described: RuntimeDescription) -> LoadRecord:
    """The adapter's record, the sandbox, and whether its runtime serves one stream at a time."""
    reached = sandbox.reached()
    asked = {**record.asked, "sandbox": reached.asked}
    got = {**record.got, "sandbox": reached.told()}
    if described.generates and described.sequences <= 1:
        got["serves"] = "one stream at a time"
    return LoadRecord(asked=asked, got=got)


def _unexpected(error: Exception) -> Fault:
    traceback.print_exception(error)
    return Fault(f"the request could not be prepared: {in_words(error)}")
