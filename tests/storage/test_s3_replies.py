"""Listings of S3 are parsed as botocore parses them, less what nobody uses."""

from __future__ import annotations

from typing import Any

import pytest

from nxd_ckpt.storage.s3.bucket import S3Options
from nxd_ckpt.storage.s3.replies import ListingParsers, time_of

pytestmark = [pytest.mark.plain, pytest.mark.once]

SPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
ENTRY = (
    "<Contents><Key>a&amp;b/%20</Key><LastModified>2026-11-27T10:00:00.123Z</LastModified>"
    "<ETag>&quot;1f&quot;</ETag><Size>12</Size></Contents>"
)
BODY = (
    f"<Name>bucket</Name><IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>{ENTRY}"
    "<CommonPrefixes><Prefix>a/dp_rank_</Prefix></CommonPrefixes><CommonPrefixes><Prefix>b/</Prefix></CommonPrefixes>"
    f"<KeyCount>4</KeyCount>{ENTRY.replace('12', '0')}<EncodingType>url</EncodingType>"
)


@pytest.fixture(scope="module")
def shape() -> Any:
    client = S3Options(anon=True, client_kwargs={"region_name": "us-east-1"}).client()
    return client.meta.service_model.operation_model("ListObjectsV2").output_shape


def parsed(body: str, shape: Any, *, ours: bool, status: int = 200) -> Any:
    """The reply as our parser, or botocore's alone, makes it."""
    from botocore.parsers import ResponseParserFactory

    factory = ResponseParserFactory()
    factory.set_parser_defaults(timestamp_parser=time_of)
    parser = (ListingParsers(factory) if ours else factory).create_parser("rest-xml")
    return parser.parse({"status_code": status, "headers": {}, "body": body.encode(), "context": {}}, shape)


@pytest.mark.parametrize("space", ["", SPACE])
@pytest.mark.parametrize("body", [BODY, "<KeyCount>0</KeyCount>", BODY.replace("<Size>12</Size>", "<Size/>"), ""])
def test_a_listing_is_the_same(space: str, body: str, shape: Any) -> None:
    """With and without a namespace, prefixes and entries; or neither parser takes it."""
    reply = f'<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult {space}>{body}</ListBucketResult>'
    try:
        expected = parsed(reply, shape, ours=False)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)[:20]):
            parsed(reply, shape, ours=True)
    else:
        assert expected == parsed(reply, shape, ours=True)


def test_an_error_is_left_to_botocore(shape: Any) -> None:
    """So is a reply that is no XML."""
    from botocore.parsers import ResponseParserError

    error = "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    assert "AccessDenied" == parsed(error, shape, ours=True, status=403)["Error"]["Code"]
    with pytest.raises(ResponseParserError):
        parsed("<ListBucketResult>", shape, ours=True)


def test_a_time_without_a_zone_letter_is_parsed() -> None:
    """Some stores write another form."""
    assert time_of("2026-11-27T10:00:00.000Z") == time_of("Fri, 27 Nov 2026 10:00:00 GMT")
