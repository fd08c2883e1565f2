"""Entities that are found in a text, and similar text that is not."""

import pytest

from kelvin.contracts.artifacts.filter_api import ENTITIES, FilterRule, apply_result
from kelvin.filters.pii import scan_text, unknown_region

ALL = (FilterRule(filter="pii", actions=dict.fromkeys(ENTITIES, "redact"), phone_regions=("US", "DE")),)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("to jo.doe+x@mail.example.co.uk, now", "to <EMAIL_ADDRESS>, now", id="an e-mail address"),
        pytest.param("müller@bücher.example", "<EMAIL_ADDRESS>", id="letters beyond ASCII"),
        pytest.param("请联系foo@bar.com谢谢", "请联系<EMAIL_ADDRESS>谢谢", id="between letters of another script"),
        pytest.param("a @ b, x@y, @home.example", "a @ b, x@y, @home.example", id="no e-mail address"),
        pytest.param("4111 1111 1111 1111 12/27", "<CREDIT_CARD> 12/27", id="a card and what follows it"),
        pytest.param("5500-0000-0000-0004.", "<CREDIT_CARD>.", id="a card with hyphens"),
        pytest.param("1 4111111111111111", "1 <CREDIT_CARD>", id="a card after a number"),
        pytest.param("4111111111111112", "4111111111111112", id="a card's length without its check digit"),
        pytest.param("x4111111111111111", "x4111111111111111", id="part of a word"),
        pytest.param("DE89 3704 0044 0532 0130 00 THANKS", "<IBAN_CODE> THANKS", id="an IBAN before capitals"),
        pytest.param("GB29NWBK60161331926819", "<IBAN_CODE>", id="an IBAN with letters"),
        pytest.param("GB29 NWBK 6016 1331 9268 19", "<IBAN_CODE>", id="the same in groups"),
        pytest.param("DE88 3704 0044 0532 0132 02", "DE88 3704 0044 0532 0132 02", id="no IBAN"),
        pytest.param("at 192.168.0.1, or [2001:db8::1]:80", "at <IP_ADDRESS>, or [<IP_ADDRESS>]:80", id="IP addresses"),
        pytest.param("at abcd:ef:abcd:ef:abcd:ef:abcd:ef now", "at <IP_ADDRESS> now", id="an IPv6 without digits"),
        pytest.param("at fe:\u200b:ab now", "at <IP_ADDRESS> now", id="an IPv6 address with an invisible character"),
        pytest.param("std::cout 12:30:45 1.2.3 300.1.1.1", "std::cout 12:30:45 1.2.3 300.1.1.1", id="no IP addresses"),
        pytest.param("078-05-1121", "<US_SSN>", id="a social security number"),
        pytest.param("call +49 30 901820 or (212) 555-0143", "call <PHONE_NUMBER> or <PHONE_NUMBER>", id="telephones"),
        pytest.param("030/901820", "<PHONE_NUMBER>", id="a phone number in national form"),
        pytest.param("4111\u20111111\u20111111\u20111111", "<CREDIT_CARD>", id="hyphens that don't break"),
        pytest.param("4111\u20091111\u202f1111\u00a01111!", "<CREDIT_CARD>!", id="thin spaces"),
        pytest.param("4111\t1111\t1111\t1111", "<CREDIT_CARD>", id="tabs"),
        pytest.param("4111  1111  1111  1111", "<CREDIT_CARD>", id="two spaces"),
        pytest.param("4111.1111.1111.1111", "<CREDIT_CARD>", id="dots between groups"),
        pytest.param("3.14159265358979 5.500000000000004", "3.14159265358979 5.500000000000004", id="decimal points"),
        pytest.param("４１１１ １１１１ １１１１ １１１１", "<CREDIT_CARD>", id="digits of full width"),
        pytest.param("٤١١١ ١١١١ ١١١١ ١١١١", "<CREDIT_CARD>", id="digits of another script"),
        pytest.param("4111\u200b1111 1111\u20601111.", "<CREDIT_CARD>.", id="characters without width"),
        pytest.param("411\u00ad1\u200d 1111 1111 1111", "<CREDIT_CARD>", id="characters without width in a group"),
        pytest.param("4\ufe0f1\u034f11\U000e0041 1111 1111\u061c 1111", "<CREDIT_CARD>", id="rare invisible marks"),
        pytest.param(
            "jo\u200b@example\u2060.org\u200b.",
            "<EMAIL_ADDRESS>\u200b.",
            id="invisible characters in an e-mail address",
        ),
        pytest.param("ｊｏ＠ｅｘａｍｐｌｅ．ｏｒｇ", "<EMAIL_ADDRESS>", id="letters of full width"),
        pytest.param("de89370400440532013000", "<IBAN_CODE>", id="an IBAN in small letters"),
        pytest.param("my de89 3704 0044 0532 0130 00 there", "my <IBAN_CODE> there", id="IBAN groups, small letters"),
        pytest.param("gb29 nwbk 6016 1331 9268 19 and", "<IBAN_CODE> and", id="an IBAN with a small bank code"),
        pytest.param("Gb29nwbk60161331926819", "<IBAN_CODE>", id="an IBAN in capitals and small letters"),
        pytest.param("DE89\u20113704\u20110044\u20110532\u20110130\u201100", "<IBAN_CODE>", id="an IBAN's hyphens"),
        pytest.param("078\u201105\u20111121", "<US_SSN>", id="a social security number's hyphens"),
        pytest.param("078 05 1121 and 078.05.1121", "<US_SSN> and <US_SSN>", id="SSNs with spaces and dots"),
        pytest.param("1 078 05 1121 2", "1 078 05 1121 2", id="no social security number"),
        pytest.param("192．168．0．1", "<IP_ADDRESS>", id="a full-width IP address"),
        pytest.param("+49\u200930\u2011901820", "<PHONE_NUMBER>", id="a telephone's spaces"),
        pytest.param("in 2026 there were 12 apples at 3.50", "in 2026 there were 12 apples at 3.50", id="prose"),
    ],
)
def test_entities_are_found_by_pattern_and_checksum(text: str, shown: str) -> None:
    """Entities are found by pattern and checksum. The rest of the text is unchanged."""
    assert apply_result(text, scan_text(text, ALL, whole=True)).text == shown


def test_only_named_entities_are_redacted() -> None:
    """Only the named entity is redacted. A phone number without a country code needs a region."""
    rules = (FilterRule(filter="pii", actions={"PHONE_NUMBER": "redact"}),)
    text = "+49 30 901820, 030/901820, jo@example.org"
    assert apply_result(text, scan_text(text, rules, whole=True)).text == "<PHONE_NUMBER>, 030/901820, jo@example.org"


def test_scan_ends_at_the_first_stopping_entity() -> None:
    """Text before the stopping entity passes with redactions. Text after it isn't scanned."""
    rules = (FilterRule(filter="pii", actions={"EMAIL_ADDRESS": "redact", "CREDIT_CARD": "stop"}),)
    text = "a@b.example 4111111111111111 c@d.example"
    passed = apply_result(text, scan_text(text, rules, whole=True))
    assert (passed.text, passed.stopped) == ("<EMAIL_ADDRESS> ", "CREDIT_CARD")


def test_unknown_phone_region_is_refused() -> None:
    """The unknown region is returned."""
    assert unknown_region(ALL[0]) is None
    assert unknown_region(FilterRule(filter="pii", actions={}, phone_regions=("DE", "XX"))) == "XX"
