"""The ports of an activator, or the socket that it was given: what can't be listened on is a bad setting."""

import errno
import os
import socket

from activator.settings import ActivatorSettings
from contracts.settings import BadSetting
from service.listener import listen


def listen_for(settings: ActivatorSettings) -> socket.socket:
    """Return the listening socket of the front door. Raises BadSetting."""
    if settings.listener_fd is not None:
        try:
            given = socket.socket(fileno=settings.listener_fd)
        except OSError as error:
            raise BadSetting("KELVIN_LISTENER_FD", str(settings.listener_fd), "is no socket") from error
        given.set_inheritable(False)
        return given
    try:
        return listen(settings.host, settings.port)
    except socket.gaierror as error:
        raise BadSetting("KELVIN_HOST", settings.host, error.strerror or "is no address") from error
    except OSError as error:
        rule = f"{settings.host} refuses it: {os.strerror(error.errno or errno.EINVAL)}"
        raise BadSetting("KELVIN_PORT", str(settings.port), rule) from error


def listen_plain(host: str, port: int) -> socket.socket:
    """Return the listening socket of Knative's data path. Raises BadSetting."""
    try:
        return listen(host, port)
    except OSError as error:
        rule = f"can't be listened on: {error.strerror or os.strerror(error.errno or errno.EINVAL)}"
        raise BadSetting("KELVIN_ACTIVATOR_LISTEN", f"{host}:{port}", rule) from error
