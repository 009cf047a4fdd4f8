"""The version of the installed distribution."""


def installed_version() -> str:
    """The version; without an installed distribution (a bare source tree), zero."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gpytorch-gaps")
    except PackageNotFoundError:
        return "0+unknown"
