"""A client of `vfl serve`."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vfl_flower.config.checks import is_loopback
from vfl_flower.config.errors import ConfigError, VflError

_MOST = 10_000  # ids of a request
_MOST_PEOPLE = 500  # rows of a request, so that its body stays below 1 MiB


class Scores:
    """Ask a service for scores, over one connection.

    Parameters
    ----------
    url : address that `vfl serve` prints, without a path. It begins with https, unless the service
        listens on this machine.
    token : the token, or the file that has it.
    certificate : file of the certificate (PEM) that the service must have. The default trusts the
        system's authorities.
    timeout : seconds that a request may take.

    Raises
    ------
    ConfigError
        If the package httpx is missing, or the file of the token has none. Also if the URL would
        send the token unencrypted.

    Examples
    --------
    ::

        with Scores("https://scores.bank.example:8443", "serve.token") as scores:
            for each in scores.predict(["u1", "u2"]):
                print(each["id"], each["prediction"], each["missing"])
    """

    def __init__(
        self, url: str, token: str | Path, certificate: str | Path = "", timeout: float = 10.0
    ) -> None:
        try:
            import httpx
        except ImportError:
            raise ConfigError(
                "The client needs httpx. Install it by `pip install 'vfl-flower[serve]'`."
            ) from None
        try:
            parts = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise ConfigError(
                f"url = {url!r} is not a URL: {error}. Give https://HOST:PORT."
            ) from None
        here = is_loopback(parts.host)
        if parts.scheme != "https" and not (parts.scheme == "http" and here):
            raise ConfigError(
                f"url = {url!r} would send the token unencrypted. Give https://HOST:PORT. Only a "
                "service on this machine may have http."
            )
        try:
            trusted: Any = (
                ssl.create_default_context(cafile=str(certificate)) if certificate else True
            )
        except OSError as error:  # also one of SSL
            raise ConfigError(
                f"certificate = '{certificate}' cannot be used: {error}. Name a PEM file."
            ) from None
        self._certificate, self._timeout = str(certificate), timeout
        headers = {"Authorization": f"Bearer {_token(token)}"}
        self._errors = httpx.HTTPError
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            verify=trusted,
            timeout=timeout,
            follow_redirects=False,  # another host would get the token
            trust_env=not here,  # so would a proxy that the environment names
        )

    def predict(
        self, ids: Sequence[int | str], explain: bool | str = False
    ) -> list[dict[str, Any]]:
        """Return a score for each id, in their order; more than 10,000 take several requests.

        Each is a dictionary of "id", "prediction", "probabilities" by class, "parties" used, and
        "missing": party -> why its data are not in the score. "prediction" is None for an id that
        cannot be scored.

        Parameters
        ----------
        explain : whether to add "contributions": party -> its share in "score", which is "base" and
            all shares. "errors" has their standard errors. "scale" and "explained_class" say what
            that score is. An id that cannot be scored has none of them. With "columns", also add
            "reasons": party -> its columns that count most, and what each does to the score.

        Raises
        ------
        ConfigError
            If ids is one text.
        VflError
            If the service cannot be reached, or refuses. The message is the service's.
        """
        if isinstance(ids, str):  # each letter would be an id
            raise ConfigError(f"ids = {ids!r} is one text. Give a list of ids.")
        return self._predict("ids", [_plain(each) for each in ids], _MOST, explain)

    def predict_people(
        self, people: Sequence[Mapping[str, Any]], explain: bool | str = False
    ) -> list[dict[str, Any]]:
        """Return a score for each person, as `predict`, where people have no common id.

        Parameters
        ----------
        people : rows as in the label holder's file; of a frame, ``frame.to_dict("records")``.
            `model` names their columns, as "people".
        """
        rows = [{name: _plain(value) for name, value in row.items()} for row in people]
        return self._predict("people", rows, _MOST_PEOPLE, explain)

    def model(self) -> dict[str, Any]:
        """Return what the service says of its model: strategy, figures, classes, parties."""
        return self._call("GET", "/v1/model")

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> Scores:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _predict(
        self, name: str, asked: list[Any], most: int, explain: bool | str
    ) -> list[dict[str, Any]]:
        query = {"explain": explain} if explain else {}
        # A model without contributions has 0 ids, and says why in its refusal.
        most = min((self.model().get("explain_ids", 0) if explain else 0) or most, most)
        found: list[dict[str, Any]] = []
        for start in range(0, len(asked), most):
            part = {name: asked[start : start + most], **query}
            found += self._call("POST", "/v1/predict", part)["predictions"]
        return found

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            reply = self._http.request(method, path, json=body)
            said = reply.json()
        except (self._errors, ValueError) as error:
            raise VflError(f"The service at {self._http.base_url} {self._why(error)}") from None
        if reply.status_code == 401:
            raise VflError(
                "The service does not know this token. If you meant a file, check its path."
            )
        if reply.status_code != 200:
            raise VflError(said.get("error", f"The service answered {reply.status_code}."))
        return said

    def _why(self, error: BaseException) -> str:
        """Say why a call has no answer, as the end of a sentence about the service."""
        causes = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        for each in causes:
            if code := getattr(each, "verify_code", 0):
                other = (
                    "is of no authority that this machine trusts. Name its file by certificate=."
                )
                if self._certificate:
                    other = f"is not the one in {self._certificate}. Ask for the present one."
                return f"cannot be trusted: its certificate {_REASONS.get(code, other)}"
            if isinstance(each, ssl.SSLError):
                return f"does not speak TLS ({each.reason}). Correct the port, or ask its operator."
        if isinstance(error, ValueError):
            return "gave an answer that is not JSON. Is `vfl serve` running there?"
        if "Timeout" in type(error).__name__:
            return f"did not answer in {self._timeout:g} seconds. Try again, or set timeout=."
        plain = ", without a certificate" * (self._http.base_url.scheme == "http")
        return f"cannot be reached: {error}. Is `vfl serve` running there{plain}?"


def _plain(value: Any) -> Any:
    """Return a value of NumPy or pandas as JSON has it; None if it is missing."""
    import pandas as pd

    if pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value.item() if hasattr(value, "item") else value


_REASONS = {  # OpenSSL's numbers of verification errors
    9: "is not valid yet. Correct the clocks of this machine and of the service.",
    10: "has expired. Its operator renews it.",
    62: "is for another host name. Call the service by a name in its certificate.",
    64: "is for another address. Call the service by a name in its certificate.",
}


def _token(token: str | Path) -> str:
    """Return a token, or the first token in a file of `NAME TOKEN` lines."""
    text = str(token)
    if isinstance(token, str) and not Path(token).expanduser().is_file():
        return text
    path = Path(text).expanduser()
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Name the token's file."
        ) from None
    found = next((words[-1] for words in lines if words and not words[0].startswith("#")), "")
    if not found:
        raise ConfigError(f"{path} has no token. Name the file that `vfl serve` printed.")
    return found
