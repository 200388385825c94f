"""The messages of PCP, NAT-PMP and UPnP, and the tables of routes, without a network."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nat.mapping import Mapping, MappingProtocol, gateway, nat_pmp, pcp, upnp
from nat.mapping.lease import MappingFailed, clamped_lifetime

NONCE = bytes(range(12))
ANY_BYTES = st.binary(max_size=1200)


def packed(host: str) -> bytes:
    return ipaddress.IPv6Address(f"::ffff:{host}").packed


# -- NAT-PMP, RFC 6886 -----------------------------------------------------------------------


def test_nat_pmp_asks_in_the_bytes_of_the_rfc() -> None:
    assert nat_pmp.address_request().hex() == "0000"
    assert nat_pmp.map_request(4001, 4001, 7200).hex() == "000200000fa10fa100001c20"
    assert nat_pmp.map_request(4001, 0, 0).hex() == "000200000fa1000000000000"


def test_nat_pmp_reads_an_address_and_a_mapping() -> None:
    address = bytes.fromhex("0080000000000e10c6336407")
    assert nat_pmp.read_address(address) == "198.51.100.7"
    assert nat_pmp.announced_epoch(address) == 3600
    mapped = bytes.fromhex("0082000000000e100fa10fa200001c20")
    assert nat_pmp.read_mapped_port(mapped, 4001) == nat_pmp.PmpMappedPort(3600, 4002, 7200)
    assert nat_pmp.read_mapped_port(mapped, 4003) is None, "for another port"
    assert nat_pmp.read_mapped_port(mapped + b"\0", 4001) is None, "too long"
    assert nat_pmp.read_mapped_port(mapped[:-1], 4001) is None, "too short"


def test_nat_pmp_tells_why_a_router_refuses() -> None:
    with pytest.raises(MappingFailed, match="switched it off"):
        nat_pmp.read_mapped_port(bytes.fromhex("0082000200000e10"), 4001)
    with pytest.raises(MappingFailed, match="code 77"):
        nat_pmp.read_address(bytes.fromhex("0080004d"))


# -- PCP, RFC 6887 ---------------------------------------------------------------------------


def test_pcp_asks_in_the_bytes_of_the_rfc() -> None:
    request = pcp.map_request(NONCE, "192.0.2.33", 4001, 4001, 1200)
    header = "02010000000004b000000000000000000000ffffc0000221"
    part = "000102030405060708090a0b060000000fa10fa100000000000000000000ffff00000000"
    assert request.hex() == header + part
    assert len(request) == 60


GRANTED = (
    bytes.fromhex("02810000000004b000000e10" + "00" * 12)
    + NONCE
    + bytes.fromhex("060000000fa10fa2")
    + packed("198.51.100.7")
)


def test_pcp_reads_a_mapping() -> None:
    found = pcp.read_mapped_port(GRANTED, NONCE, 4001)
    assert found == pcp.MappedPort(3600, "198.51.100.7", 4002, 1200)
    assert pcp.read_mapped_port(GRANTED + b"\0" * 4, NONCE, 4001) == found, "with an option"


@pytest.mark.parametrize(
    "data",
    {
        "another nonce": GRANTED.replace(NONCE, NONCE[::-1]),
        "another port": GRANTED.replace(b"\x0f\xa1", b"\x0f\xa3"),
        "UDP": GRANTED.replace(b"\x06\0\0\0", b"\x11\0\0\0"),
        "a request": b"\2\1" + GRANTED[2:],
        "another opcode": b"\2\x82" + GRANTED[2:],
        "a bare header": GRANTED[:24],
        "an odd length": GRANTED + b"\0",
        "an error with another nonce": GRANTED[:3] + b"\2" + GRANTED[4:24] + bytes(36),
    }.values(),
)
def test_pcp_ignores_what_is_no_answer_to_its_question(data: bytes) -> None:
    assert pcp.read_mapped_port(data, NONCE, 4001) is None


def test_pcp_tells_why_a_router_refuses() -> None:
    with pytest.raises(MappingFailed, match="switched it off"):
        pcp.read_mapped_port(GRANTED[:3] + b"\2" + GRANTED[4:], NONCE, 4001)
    with pytest.raises(MappingFailed, match="version"):
        pcp.read_mapped_port(bytes.fromhex("0081000100000e10"), NONCE, 4001)  # of NAT-PMP
    with pytest.raises(MappingFailed, match="version"):
        pcp.read_mapped_port(b"\2\x81\0\1" + bytes(20), NONCE, 4001)


def test_an_announcement_of_pcp_is_read_and_an_answer_is_none() -> None:
    assert pcp.announced_epoch(bytes.fromhex("028000000000000000000007") + bytes(12)) == 7
    assert pcp.announced_epoch(GRANTED) is None


READERS: dict[str, Callable[[bytes], object]] = {
    "nat_pmp.read_address": nat_pmp.read_address,
    "nat_pmp.read_mapped_port": lambda data: nat_pmp.read_mapped_port(data, 4001),
    "nat_pmp.announced_epoch": nat_pmp.announced_epoch,
    "pcp.read_mapped_port": lambda data: pcp.read_mapped_port(data, NONCE, 4001),
    "pcp.announced_epoch": pcp.announced_epoch,
    "upnp.read_search_answer": upnp.read_search_answer,
    "upnp.read_services": lambda data: upnp.read_services(data, "http://h:1/", "h"),
    "upnp.read_soap_answer": lambda data: upnp.read_soap_answer(500, data),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
@given(data=ANY_BYTES, start=st.sampled_from([b"", b"\0\x80\0\0", b"\0\x82", b"\2\x81", b"<a>"]))
def test_garbage_is_ignored_or_refused_and_nothing_else(
    read: Callable[[bytes], object], data: bytes, start: bytes
) -> None:
    try:
        read(start + data)
    except MappingFailed:
        return


@given(at=st.integers(0, len(GRANTED) - 1), byte=st.integers(0, 255))
def test_a_changed_byte_never_gives_a_mapping_of_another_node(at: int, byte: int) -> None:
    changed = GRANTED[:at] + bytes((byte,)) + GRANTED[at + 1 :]
    try:
        found = pcp.read_mapped_port(changed, NONCE, 4001)
    except MappingFailed:
        return
    for fixed in (slice(24, 37), slice(40, 42)):  # nonce and protocol, our port
        assert found is None or changed[fixed] == GRANTED[fixed]


# -- UPnP ------------------------------------------------------------------------------------

IGD = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
WAN = "urn:schemas-upnp-org:service:WANIPConnection:1"
PPP = "urn:schemas-upnp-org:service:WANPPPConnection:1"
AT = "http://192.168.1.1:5000/root.xml"


def test_a_search_answer_is_read_whatever_the_case_of_its_headers() -> None:
    answer = f"HTTP/1.1 200 OK\r\nst: {IGD}\r\nlocation:{AT}\r\n\r\n".encode()
    assert upnp.read_search_answer(answer) == AT


@pytest.mark.parametrize(
    "answer",
    [
        f"NOTIFY * HTTP/1.1\r\nST: {IGD}\r\nLOCATION: {AT}\r\n\r\n",
        f"HTTP/1.1 404 No\r\nST: {IGD}\r\nLOCATION: {AT}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nST: upnp:rootdevice\r\nLOCATION: {AT}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nST: {IGD}\r\n\r\n",
    ],
)
def test_other_answers_to_a_search_are_ignored(answer: str) -> None:
    assert upnp.read_search_answer(answer.encode()) is None


def service(kind: str, url: str) -> str:
    return (
        f"<service><serviceType>{kind}</serviceType><controlURL>{url}</controlURL>"
        "<eventSubURL>/events</eventSubURL></service>"
    )


def described(*services: str, base: str = "") -> bytes:
    return f"<root>{base}<device>{''.join(services)}</device></root>".encode()


def test_the_services_that_map_ports_are_found_in_a_description() -> None:
    document = described(service("urn:x:service:Other:1", "/o"), service(WAN, "c?a=b"),
                         service(PPP, "http://192.168.1.1/ppp"))  # fmt: skip
    assert upnp.read_services(document, AT, "192.168.1.1") == [
        upnp.IgdService(WAN, 5000, "/c?a=b"),
        upnp.IgdService(PPP, 80, "/ppp"),
    ]


def test_the_base_of_urls_is_followed_on_the_router_only() -> None:
    near = described(service(WAN, "/c"), base="<URLBase>http://192.168.1.1:49152</URLBase>")
    assert upnp.read_services(near, AT, "192.168.1.1") == [upnp.IgdService(WAN, 49152, "/c")]
    far = described(service(WAN, "/c"), base="<URLBase>http://10.0.0.9:80</URLBase>")
    assert upnp.read_services(far, AT, "192.168.1.1") == []


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.9/c", "https://192.168.1.1/c", "//10.0.0.9/c", "http://192.168.1.1:99999/c",
     "http://[::1/c", "ftp://192.168.1.1/c", "http://192.168.1.1/ü", ""],
)  # fmt: skip
def test_a_url_that_leads_elsewhere_is_left_out(url: str) -> None:
    assert upnp.read_services(described(service(WAN, url)), AT, "192.168.1.1") == []


def test_a_description_of_a_thousand_services_gives_four() -> None:
    document = described(*[service(WAN, f"/{number}") for number in range(1000)])
    assert len(upnp.read_services(document, AT, "192.168.1.1")) == 4


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_document_type_is_refused_in_any_encoding(encoding: str) -> None:
    bomb = '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]><a>&c;</a>'
    with pytest.raises(MappingFailed, match="document type"):
        upnp.read_soap_answer(200, bomb.encode(encoding))


def test_a_refusal_in_soap_has_its_code() -> None:
    with pytest.raises(upnp.SoapFault) as caught:
        upnp.read_soap_answer(500, b"<e><errorCode>725</errorCode></e>")
    assert caught.value.code == 725


# -- mappings and gateways -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "is_public"),
    [("9.9.9.9", True), ("192.168.1.1", False), ("10.1.2.3", False), ("100.64.0.1", False),
     ("169.254.1.1", False), ("0.0.0.0", False), ("127.0.0.1", False), ("2a00:1450::1", True)],
)  # fmt: skip
def test_a_mapping_is_public_if_its_host_is_of_the_internet(host: str, is_public: bool) -> None:
    mapping = Mapping(MappingProtocol.PCP, host, 1, 1, 60)
    assert mapping.is_public is is_public


@pytest.mark.parametrize(("granted", "used"), [(1, 60), (1200, 1200), (2**32 - 1, 7200)])
def test_a_lifetime_is_used_within_limits(granted: float, used: float) -> None:
    assert clamped_lifetime(granted) == used


def as_kernel_writes(host: str) -> str:
    return f"{int.from_bytes(ipaddress.IPv4Address(host).packed, sys.byteorder):08X}"


def test_on_linux_the_default_route_of_the_lowest_metric_has_the_gateway() -> None:
    routes = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\n"
    for device, destination, via, flags, metric, mask in [
        ("wlan0", "0.0.0.0", "192.168.2.1", "0003", 600, "0.0.0.0"),
        ("eth0", "0.0.0.0", "192.168.1.1", "0003", 100, "0.0.0.0"),
        ("eth1", "0.0.0.0", "192.168.3.1", "0002", 1, "0.0.0.0"),
        ("tun0", "0.0.0.0", "0.0.0.0", "0001", 50, "0.0.0.0"),
        ("tun0", "0.0.0.0", "10.8.0.1", "0003", 0, "128.0.0.0"),
        ("eth0", "192.168.1.0", "0.0.0.0", "0001", 100, "255.255.255.0"),
    ]:
        fields = (device, as_kernel_writes(destination), as_kernel_writes(via), flags, "0", "0")
        routes += "\t".join((*fields, str(metric), as_kernel_writes(mask), "0")) + "\n"
    assert gateway.gateway_of_linux(routes) == "192.168.1.1"
    assert gateway.gateway_of_linux("Iface\nlo zz\n") is None


def test_on_macos_the_gateway_is_read_from_the_routes_description() -> None:
    output = "   route to: default\ndestination: default\n    gateway: 192.168.1.1\n  flags: <UP>\n"
    assert gateway.gateway_of_macos(output) == "192.168.1.1"
    assert gateway.gateway_of_macos("    gateway: fe80::1%en0\n") is None
    assert gateway.gateway_of_macos("    gateway: 1.2.3.4.5\n") is None


def test_on_windows_the_route_of_the_lowest_metric_has_the_gateway() -> None:
    output = (
        "IPv4-Routentabelle\r\nAktive Routen:\r\n"
        "     Netzwerkziel    Netzwerkmaske          Gateway    Schnittstelle Metrik\r\n"
        "          0.0.0.0          0.0.0.0      192.168.2.1     192.168.2.20     50\r\n"
        "          0.0.0.0          0.0.0.0      192.168.1.1     192.168.1.20     25\r\n"
    )
    assert gateway.gateway_of_windows(output) == "192.168.1.1"
    assert gateway.gateway_of_windows("") is None


@given(output=st.text(max_size=60))
def test_no_output_of_a_command_breaks_the_reading_of_it(output: str) -> None:
    for read in (gateway.gateway_of_linux, gateway.gateway_of_macos, gateway.gateway_of_windows):
        found = read(output)
        assert found is None or ipaddress.IPv4Address(found)
