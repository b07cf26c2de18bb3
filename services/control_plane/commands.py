"""The routes that change a run. Each needs the token, and answers 202: what it asks for rides in the
replies to the next heartbeats, and `/status` shows when it has been done."""

import hmac
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, HTTPException, Path
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from common.contracts.control_messages import (
    Command,
    CommandName,
    EvaluatorReport,
    ServiceHeartbeat,
)
from services.control_plane.history import Recorder
from services.control_plane.registry import InstanceView, Registry
from services.control_plane.responses import NO_TOKEN, UNAUTHORIZED, Responses, example, problem
from services.control_plane.status import CommandAccepted

RunCommand = Literal["pause", "resume", "drain", "stop", "checkpoint"]
RunCommandPath = Annotated[
    RunCommand,
    Path(
        description="pause, resume: targets and workers. drain: workers finish what they hold and "
        "end. stop: every service ends. checkpoint: workers write one.",
        examples=["checkpoint"],
    ),
]
InstancePath = Annotated[
    str,
    Path(
        min_length=1,
        max_length=200,
        description="An `instance` of /status.",
        examples=["main-0"],
    ),
]

NO_EVALUATOR = (
    "no evaluator follows this run; start one with `ringdraft up --set launcher.follow=true`, or "
    "measure the newest checkpoints once with `ringdraft eval --set run.directory=<run_dir>`"
)


@dataclass(frozen=True)
class TokenCheck:
    """A dependency that refuses requests without the token before anything else is looked at."""

    token: str

    def __call__(
        self,
        credentials: Annotated[
            HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))
        ],
    ) -> None:
        """Answer 401 where the token is not there."""
        given = credentials.credentials if credentials is not None else ""
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise HTTPException(401, NO_TOKEN, headers={"WWW-Authenticate": "Bearer"})


@dataclass(frozen=True)
class Desk:
    """Where commands are given and noted."""

    registry: Registry
    history: Recorder

    def give(self, name: CommandName) -> CommandAccepted:
        """Give a command to the run."""
        return self._accept(self.registry.command(name))

    def give_instance(self, name: CommandName, instance: str) -> CommandAccepted:
        """Give a command to one session, or answer 404 or 409."""
        given = self.registry.command_those(name, lambda beat: beat.instance == instance)
        if given is None:
            raise _why_not_given(self.registry, name, instance)
        return self._accept(given, instance)

    def ask_evaluator(self) -> CommandAccepted:
        """Ask the evaluator that follows the run, or answer 409."""
        given = self.registry.command_those("evaluate", _is_following)
        if given is None:
            raise HTTPException(409, NO_EVALUATOR)
        return self._accept(given)

    def _accept(self, given: tuple[Command, int], instance: str = "") -> CommandAccepted:
        command, num_recipients = given
        plural = "" if num_recipients == 1 else "s"
        text = f"{command.name}, given to {num_recipients} service{plural}"
        self.history.note("command", instance, text)
        return CommandAccepted(
            name=command.name, number=command.number, num_recipients=num_recipients
        )


def command_routes(registry: Registry, history: Recorder, token: str) -> APIRouter:
    """Return the routes, to be included in the application."""
    router = APIRouter(dependencies=[Depends(TokenCheck(token))], tags=["commands"])
    desk = Desk(registry, history)
    _add_run_commands(router, desk)
    _add_instance_commands(router, desk)
    return router


def _add_run_commands(router: APIRouter, desk: Desk) -> None:
    @router.post(
        "/runs/{name}", status_code=202, responses=_documented("checkpoint"),
        summary="Command the whole run",
    )  # fmt: skip
    def command(name: RunCommandPath) -> CommandAccepted:
        """pause, resume, drain and stop hold for services that come later, until the next of them;
        checkpoint is for the workers of this moment."""
        return desk.give(name)

    @router.post(
        "/evaluations", status_code=202, summary="Evaluate the newest checkpoints next",
        responses=_documented("evaluate")
        | problem(409, "Nobody is there to evaluate.", NO_EVALUATOR),
    )  # fmt: skip
    def evaluate() -> CommandAccepted:
        """An evaluator that follows the run takes the newest checkpoint of each series before older
        ones, behind the one that it is at. Figures come under `evaluations` of /status."""
        return desk.ask_evaluator()


def _add_instance_commands(router: APIRouter, desk: Desk) -> None:
    @router.post(
        "/workers/{instance}/drain", status_code=202, responses=_instance_documented("drain"),
        summary="Have one worker finish and end",
    )  # fmt: skip
    def drain(instance: InstancePath) -> CommandAccepted:
        """It takes no more rows, steps with what it holds, writes a checkpoint and ends; the others
        get the rows that come."""
        return desk.give_instance("drain", instance)

    @router.post(
        "/services/{instance}/stacks", status_code=202, responses=_instance_documented("stacks"),
        summary="Have one service write its stacks into its log",
    )  # fmt: skip
    def stacks(instance: InstancePath) -> CommandAccepted:
        """The process itself writes what each of its threads is at, as long as its heartbeats come;
        where they do not, SIGUSR1 to its pid does the same."""
        return desk.give_instance("stacks", instance)


def _documented(name: CommandName) -> Responses:
    accepted = {"name": name, "number": 1795990000000, "num_recipients": 1}
    detail = "path.name: Input should be 'pause', 'resume', 'drain', 'stop' or 'checkpoint'"
    return {
        **example(202, "Given to the services of this moment.", accepted),
        **UNAUTHORIZED,
        **(problem(422, "There is no such command.", detail) if name == "checkpoint" else {}),
    }


def _instance_documented(name: CommandName) -> Responses:
    return {
        **_documented(name),
        **problem(404, "No instance has this name.", "no instance 'main-7'; there are: main-0"),
        **problem(409, "It cannot be reached.", "'main-0' is silent: its process is dead or stuck"),
        **problem(422, "That is no name.", "path.instance: String should have at most 200 characters"),
    }  # fmt: skip


def _is_following(beat: ServiceHeartbeat) -> bool:
    return isinstance(beat.report, EvaluatorReport) and beat.report.is_following


def _why_not_given(registry: Registry, name: CommandName, instance: str) -> HTTPException:
    known = [
        view for view in registry.snapshot().instances
        if name != "drain" or view.heartbeat.service == "drafter_worker"
    ]  # fmt: skip
    for view in known:
        if view.heartbeat.instance == instance:
            return HTTPException(409, _why_unreachable(view))
    names = ", ".join(sorted({view.heartbeat.instance for view in known})) or "none"
    return HTTPException(404, f"no instance {instance!r} to {name}; there are: {names}")


def _why_unreachable(view: InstanceView) -> str:
    name, pid = view.heartbeat.instance, view.heartbeat.pid
    if view.condition == "silent":
        return (
            f"{name!r} (pid {pid}) is silent since {view.age_seconds:.1f} s: its process is dead or "
            f"stuck and hears no command; see its log, or send it SIGUSR1 for its stacks"
        )
    return f"{name!r} (pid {pid}) has {view.condition}; there is nothing left to command"
