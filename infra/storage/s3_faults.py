"""What an error of s3fs, botocore or aiohttp means: bad input, a fault that may pass, or an answer."""

import asyncio
import errno

from infra.errors import BadInput, NoRoom, Transient

_REFUSED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "403", "401"}
_REFUSED |= {"400"}  # a reply to HEAD has no body: all that is said of an expired token
_LOST = {"PreconditionFailed", "412"}
_PASSING = {"SlowDown", "RequestTimeout", "IncompleteBody", "BadDigest", "ConditionalRequestConflict"}
_PASSING_ERRNO = {errno.EBUSY, errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ECONNREFUSED}


_FULL = {"InsufficientStorage", "QuotaExceeded", "QuotaExceededException", "XMinioStorageFull", "507"}
"""What S3 has no word for, as servers that can be full say it."""


class ConditionFailed(Exception):
    """The object is not, or not any more, what a conditional request expects."""


def classify(path: str, error: Exception) -> Exception:
    """The fault to raise for an error of s3fs, botocore or aiohttp: itself when there is nothing to add."""
    import aiohttp
    from botocore import exceptions as boto

    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) if isinstance(response, dict) else 0
    if isinstance(error, FileExistsError):
        return error
    if code in _LOST or status == 412:
        return ConditionFailed(path)
    credentials = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound)
    if isinstance(error, (PermissionError, *credentials)) or code in _REFUSED:
        return BadInput(
            f"s3://{path}: access refused ({error}); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL "
            "and the bucket's policy"
        )
    if code == "NoSuchBucket":
        return BadInput(f"s3://{path}: there is no such bucket; create it or check AWS_ENDPOINT_URL")
    if code in _FULL or status == 507:
        return NoRoom(f"s3://{path}: the store is full ({error}); make room, and start the same run again")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"s3://{path}")
    network = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, aiohttp.ClientError)
    passing = isinstance(error, (ConnectionError, TimeoutError, asyncio.IncompleteReadError, *network))
    if passing or code in _PASSING or status == 429 or status >= 500:
        return Transient(f"s3://{path}: {type(error).__name__}: {error}")
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNO:
        return Transient(f"s3://{path}: {error}")
    return error
