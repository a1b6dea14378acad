"""What can go wrong between this process and an engine. The pool and the weight keeper decide by these types."""

from __future__ import annotations

from common.errors import RollmillError


class EngineError(RollmillError):
    """An engine did not do what it was asked to. The message names the engine and what it said."""


class EngineUnavailable(EngineError):
    """It can't be reached, is too slow, or is broken: no token was kept, and another engine may do it."""


class NotUpYet(EngineUnavailable):
    """It has not answered since it was registered: it may still be starting."""


class Unversioned(EngineUnavailable):
    """It serves weights that are not a version of this run, so its tokens can't be trained on."""


class LoadRefused(EngineError):
    """It says that it can't take these weights; the old ones serve on."""


class ContextTooSmall(EngineError):
    """Its context is shorter than its run needs: it would cut episodes, so it gets no work until it is started anew."""


class Superseded(EngineError):
    """It has taken a newer claim, or this one ended with its resume: nothing was done, and nothing is left to do."""


class ContextOverflow(EngineError):
    """The prompt leaves no room for a token in the engine's context. That holds all that the run needs, see
    ContextTooSmall: no other engine can do it."""
