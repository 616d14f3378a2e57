"""Addresses as people type them."""

import pytest

from cloister.types.addresses import check_scheme
from cloister.types.errors import ConfigError


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9007", "https://relay.example/", "http://localhost", "HTTPS://relay.example"]
)
def test_an_address_with_its_scheme_is_accepted(url):
    check_scheme(url, "relay")


@pytest.mark.parametrize("url", ["127.0.0.1:9007", "localhost:8000", "relay.example"])
def test_an_address_without_its_scheme_is_told_the_one_with_it(url):
    told = f"the address {url} lacks its scheme; give http://{url}, or https:// with TLS"
    with pytest.raises(ConfigError, match=told) as caught:
        check_scheme(url, "relay")
    assert caught.value.param == "relay"


def test_another_scheme_is_replaced():
    with pytest.raises(ConfigError, match=r"has a scheme other than http; give http://relay\.example, or"):
        check_scheme("ftp://relay.example", "relay")


@pytest.mark.parametrize("url", ["mine", "https:/relay.example", "ftp://mine"])
def test_what_is_no_address_is_told_an_example(url):
    with pytest.raises(ConfigError, match=rf"{url} is no address; give one such as https://relay\.example"):
        check_scheme(url, "relay")
