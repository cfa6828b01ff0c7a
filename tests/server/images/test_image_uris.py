import pytest

from kestrel_grpc.images.image_uris import ImageUriNotAllowed, Target, allowed_target, is_public, parse_hosts

HOSTS = parse_hosts(
    "example.com, .cdn.example.com, images.example.org:8443, http://plain.example.org, [2606:4700::1]"
)


@pytest.mark.parametrize(
    ("uri", "target"),
    [
        ("https://example.com/a.png", Target("https", "example.com", 443, "/a.png")),
        ("HTTPS://EXAMPLE.com", Target("https", "example.com", 443, "/")),
        ("https://example.com:443/a?b=c&d#e", Target("https", "example.com", 443, "/a?b=c&d")),
        ("https://a.cdn.example.com/", Target("https", "a.cdn.example.com", 443, "/")),
        ("https://a.b.cdn.example.com/", Target("https", "a.b.cdn.example.com", 443, "/")),
        ("https://images.example.org:8443/x", Target("https", "images.example.org", 8443, "/x")),
        ("http://plain.example.org/x", Target("http", "plain.example.org", 80, "/x")),
        ("https://[2606:4700::1]/x", Target("https", "2606:4700::1", 443, "/x")),
    ],
)
def test_what_is_on_a_listed_host_is_allowed(uri, target):
    assert allowed_target(uri, HOSTS) == target


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "a.png",
        "/etc/passwd",
        "file:///etc/passwd",
        "ftp://example.com/a.png",
        "gopher://example.com/",
        "https:///a.png",
        "http://example.com/",
        "https://plain.example.org/",
        "https://example.com:8443/",
        "https://example.com:99999/",
        "https://example.com:x/",
        "https://images.example.org/x",
        "https://www.example.com/",
        "https://cdn.example.com/",
        "https://evilcdn.example.com/",
        "https://example.com.evil.org/",
        "https://example.com./",
        "https://evil.org/?https://example.com/",
        "https://evil.org#@example.com/",
        "https://example.com@evil.org/",
        "https://user:password@example.com/",
        "https://evil.org\\@example.com/",
        "https://example.com\\@evil.org/",
        "https://exam\tple.com/",
        "https://example.com/\r\nHost: evil.org",
        "https://example.com/a b",
        "https://exämple.com/",
        "https://[::1/",
        "https://127.0.0.1/",
        "https://example.com/" + "a" * 3000,
    ],
)
def test_nothing_else_is_allowed(uri):
    with pytest.raises(ImageUriNotAllowed) as caught:
        allowed_target(uri, HOSTS)
    assert [violation.field for violation in caught.value.violations] == ["image.uri"]


@pytest.mark.parametrize(
    "text", ["", ",", "https://", "ftp://example.com", "example.com/path", "a@b", "a:x", "ä.com", "["]
)
def test_a_list_of_hosts_names_hosts_only(text):
    with pytest.raises(ValueError, match="must be hosts"):
        parse_hosts(text)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_addresses_on_the_internet_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "127.0.0.1",
        "127.8.8.8",
        "169.254.169.254",
        "172.16.0.1",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::10.0.0.1",
        "::1.1.1.1",
        "::ffff:10.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:0:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "2001:0:4136:e378:8000:63bf:80ff:fffe",
        "2002:a00:1::1",
        "2002:7f00:1::1",
        "2001:db8::1",
        "fc00::1",
        "fec0::1",
        "fe80::1%eth0",
        "ff02::1",
    ],
)
def test_addresses_inside_a_network_are_not_public(address):
    assert not is_public(address)
