"""Every error that superfluid reports, in one tree.

    SuperfluidError                     code, exit_code, http_status, fix
    ├── UsageError                      2, 400: refused before anything loads
    │   ├── UnknownOption   BadOptionValue   UnknownAdapter   BadConfig
    │   ├── UnknownInstall   ForeignOption   WrongRuntime   NotInstallable
    │   └── UnknownDossier
    ├── RequestError                    400: the client's request, not the server, is at fault
    │   ├── MalformedRequest   InvalidField   ContextLengthExceeded   ChatUnsupported
    │   ├── GenerationUnsupported   EmbeddingsUnsupported
    │   ├── UnknownModel (404)   NoSuchRoute (404)   MethodNotAllowed (405)
    │   └── ForeignOrigin (403)   ForeignHost (403)   BodyTooLarge (413)
    ├── ModelError                      3: the model does not load
    │   ├── ModelNotFound   ModelDamaged   FetchFailed   Offline   DigestMismatch   DiskFull
    │   └── UnsupportedArchitecture   UnsupportedType   DoesNotFit
    ├── RuntimeUnavailable              4: the runtime is not here or may not run
    │   ├── RuntimeNotInstalled   RuntimeBroken   ContractRefused   SandboxUnreachable
    │   ├── RuntimeUntested
    │   └── InstallFailed   ArtifactUnreachable   ArtifactMismatch   BadArchive   NoRoom
    ├── ServeError                      1: failed while running
    │   ├── PortInUse   NameInUse   WorkerDied   WorkerGaveUp   InstallInUse   NotRunning
    │   └── Overloaded (503)   Draining (503)   Cancelled
    ├── LinkError                       1: ends the worker, never the daemon
    │   └── LinkClosed   BadFrame   FrameTooLarge
    └── StepError                       1: what a runtime primitive may raise
        └── Unsupported   UnknownSequence   OutOfBoundary   Capacity   Fault   Fatal
            └── NotFinite, a Fault

A message says what was found and what was wanted, on one line; `fix` says what to do. `code` is
stable and machine-readable; it crosses the link and stands in HTTP error bodies and dossiers.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final


class ExitCode(enum.IntEnum):
    """Exit codes of `superfluid serve` and of every other command."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    MODEL = 3
    RUNTIME = 4


class SuperfluidError(Exception):
    """Root of the tree; `fix` may be replaced per instance where the remedy is known exactly.

    `param` names the field, option or flag at fault. `dossier` is the id of the record that a
    worker's death left, for `superfluid why ID`.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE
    http_status: ClassVar[int] = 500
    default_fix: ClassVar[str] = "run again with --log-level debug and read the log"

    def __init__(
        self,
        message: str,
        *,
        fix: str | None = None,
        param: str | None = None,
        dossier: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.fix = self.default_fix if fix is None else fix
        self.param = param
        self.dossier = dossier

    def line(self) -> str:
        """What was found, what was wanted and what to do, on one line."""
        text = f"{self.message}; {self.fix}" if self.fix else self.message
        if self.dossier:
            text += f" (dossier {self.dossier})"
        return one_line(text)


def one_line(text: str) -> str:
    """`text` as a line that no terminal takes for a command: printable, spaces between words.

    What a worker or a file's name brings is somebody else's writing.
    """
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


class UsageError(SuperfluidError):
    code = "usage"
    exit_code = ExitCode.USAGE
    http_status = 400
    default_fix = "see superfluid --help"


class UnknownOption(UsageError):
    code = "unknown_option"
    default_fix = "see superfluid serve --help"


class BadOptionValue(UsageError):
    code = "bad_option_value"
    default_fix = "give a value the option takes"


class UnknownAdapter(UsageError):
    code = "unknown_adapter"
    default_fix = "name one of the installed runtimes"


class BadConfig(UsageError):
    code = "bad_config"
    default_fix = "correct the configuration file"


class UnknownInstall(UsageError):
    code = "unknown_install"
    default_fix = "see superfluid runtimes for what is installed"


class ForeignOption(UsageError):
    code = "foreign_option"
    default_fix = "leave the option out, or choose its runtime with --runtime"


class WrongRuntime(UsageError):
    code = "wrong_runtime"
    default_fix = "leave --runtime out, and the model's format decides"


class NotInstallable(UsageError):
    code = "not_installable"
    default_fix = "see superfluid runtime versions"


class UnknownDossier(UsageError):
    code = "unknown_dossier"
    default_fix = "an error and the log name the dossier that belongs to it; the oldest are removed"


class RequestError(SuperfluidError):
    code = "bad_request"
    http_status = 400
    default_fix = "correct the request"


class MalformedRequest(RequestError):
    code = "malformed_request"
    default_fix = "send one JSON object as the body"


class InvalidField(RequestError):
    code = "invalid_value"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"
    default_fix = "shorten the prompt or serve with a larger --context"


class ChatUnsupported(RequestError):
    code = "chat_unsupported"
    default_fix = "use /v1/completions"


class GenerationUnsupported(RequestError):
    code = "generation_unsupported"
    default_fix = "use /v1/embeddings, or serve a model that gives text"


class EmbeddingsUnsupported(RequestError):
    code = "embeddings_unsupported"
    default_fix = "serve an embedding model with a runtime that embeds"


class UnknownModel(RequestError):
    code = "model_not_found"
    http_status = 404
    default_fix = "name a model that /v1/models lists"


class NoSuchRoute(RequestError):
    code = "not_found"
    http_status = 404
    default_fix = "see docs/http.md for the routes"


class MethodNotAllowed(RequestError):
    code = "method_not_allowed"
    http_status = 405
    default_fix = "use a method that the route allows"


class ForeignOrigin(RequestError):
    code = "foreign_origin"
    http_status = 403
    default_fix = "call from the server's own origin or from a program that is not a web page"


class ForeignHost(RequestError):
    code = "foreign_host"
    http_status = 403
    default_fix = "call the server by localhost or its loopback address"


class BodyTooLarge(RequestError):
    code = "body_too_large"
    http_status = 413
    default_fix = "send a smaller body"


class ModelError(SuperfluidError):
    code = "model"
    exit_code = ExitCode.MODEL
    http_status = 503
    default_fix = "see superfluid models list for what is here"


class ModelNotFound(ModelError):
    code = "model_missing"
    http_status = 404


class ModelDamaged(ModelError):
    code = "model_damaged"
    default_fix = "fetch the model again"


class FetchFailed(ModelError):
    code = "fetch_failed"
    default_fix = "check the network and the index, then try again; what was fetched is kept"


class Offline(ModelError):
    code = "offline"
    default_fix = "run once without --offline, or name a file that is here"


class DigestMismatch(ModelError):
    code = "digest_mismatch"
    default_fix = "fetch it again; if it stays, the source serves another file"


class DiskFull(ModelError):
    code = "disk_full"
    default_fix = "free disk space or set SUPERFLUID_HOME to a larger disk"


class UnsupportedArchitecture(ModelError):
    code = "unsupported_architecture"
    default_fix = "choose a model of an architecture that a runtime serves"


class UnsupportedType(ModelError):
    code = "unsupported_type"
    default_fix = "choose a file of another quantisation"


class DoesNotFit(ModelError):
    code = "does_not_fit"
    default_fix = "serve a smaller context or give a larger --memory-budget"


class RuntimeUnavailable(SuperfluidError):
    code = "runtime_unavailable"
    exit_code = ExitCode.RUNTIME
    http_status = 503
    default_fix = "reinstall superfluid"


class RuntimeNotInstalled(RuntimeUnavailable):
    code = "runtime_not_installed"
    default_fix = "install a runtime that reads this model"


class RuntimeBroken(RuntimeUnavailable):
    code = "runtime_broken"


class ContractRefused(RuntimeUnavailable):
    code = "contract_refused"
    default_fix = "install matching versions of superfluid and the runtime"


class SandboxUnreachable(RuntimeUnavailable):
    code = "sandbox_unreachable"
    default_fix = "choose a sandbox level that this machine reaches"


class RuntimeUntested(RuntimeUnavailable):
    code = "runtime_untested"
    default_fix = "allow it with --untested"


class InstallFailed(RuntimeUnavailable):
    """A runtime could not be installed; every other install is as it was."""

    code = "install_failed"
    default_fix = "try again; what failed is cleaned up by the next attempt"


class ArtifactUnreachable(InstallFailed):
    code = "artifact_unreachable"
    default_fix = "check the network, then try again"


class ArtifactMismatch(InstallFailed):
    code = "artifact_mismatch"
    default_fix = "try again; if it stays, the source serves another file"


class BadArchive(InstallFailed):
    code = "bad_archive"
    default_fix = "do not use this archive; get it again from whoever made it"


class NoRoom(InstallFailed):
    code = "no_room"
    default_fix = "free disk space or set SUPERFLUID_HOME to a larger disk"


class ServeError(SuperfluidError):
    code = "serve"
    http_status = 500


class PortInUse(ServeError):
    code = "port_in_use"
    default_fix = "choose another --port or stop the program that listens there"


class NameInUse(ServeError):
    code = "name_in_use"
    default_fix = "stop the other server or serve under another --name"


class InstallInUse(ServeError):
    code = "install_in_use"
    default_fix = "stop the server that runs it first"


class NotRunning(ServeError):
    code = "not_running"
    default_fix = "start one with superfluid serve"


class WorkerDied(ServeError):
    code = "worker_died"
    http_status = 502
    default_fix = "superfluid why tells what happened; the same request may end the same way"


class WorkerGaveUp(ServeError):
    code = "worker_gave_up"
    http_status = 503
    default_fix = "read the dossier, then start the server again"


class Overloaded(ServeError):
    code = "overloaded"
    http_status = 503
    default_fix = "try again later"


class Draining(ServeError):
    code = "draining"
    http_status = 503
    default_fix = "try again when the server is back"


class Cancelled(ServeError):
    code = "cancelled"
    http_status = 499
    default_fix = ""


class LinkError(SuperfluidError):
    code = "link"
    http_status = 502
    default_fix = "report this with the dossier"


class LinkClosed(LinkError):
    code = "link_closed"


class BadFrame(LinkError):
    code = "bad_frame"


class FrameTooLarge(LinkError):
    code = "frame_too_large"


class StepError(SuperfluidError):
    """Raised by runtime primitives; `superfluid_workerd.adapter` says which may raise what."""

    code = "step"
    http_status = 500
    default_fix = "send the request again"


class Unsupported(StepError):
    """The runtime cannot do this, ever; the executor takes another way."""

    code = "unsupported"
    http_status = 501


class UnknownSequence(StepError):
    """The sequence id was never created or is freed."""

    code = "unknown_sequence"


class OutOfBoundary(StepError):
    """A position, length or token id outside what the sequence or vocabulary has."""

    code = "out_of_boundary"


class Capacity(StepError):
    """No room now; it may fit once other sequences are freed."""

    code = "capacity"
    http_status = 503


class Fault(StepError):
    """This step failed; the lanes seated in it stop, serving goes on."""

    code = "fault"


class NotFinite(Fault):
    """The model's numbers are none: overflow, or damage that its file's checks let pass."""

    code = "not_finite"
    default_fix = (
        "use another file or quantisation of the model; the same request to this one ends the "
        "same way"
    )


class Fatal(StepError):
    """The runtime's state is lost; the worker exits and is replaced."""

    code = "fatal"


def _tree(cls: type[SuperfluidError]) -> dict[str, type[SuperfluidError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE: Final[dict[str, type[SuperfluidError]]] = _tree(SuperfluidError)
"""Every class by its code: how an error that crossed a process boundary becomes itself again."""
