//! Reads the disks in a domain's definition, and replaces their sources. All other bytes of the definition stay as they are.

use std::ops::Range;
use std::path::{Path, PathBuf};

use roxmltree::{Document, Node, ParsingOptions};

use super::error::LibvirtError;

/// The limit of nodes in a definition; the largest ones have some thousands.
const NODES_MAX: u32 = 100_000;

/// A disk or drive of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its name among the domain's disks, such as `vda`.
    pub target: String,
    /// Its kind for the guest: `disk`, `cdrom`, `floppy`, `lun`.
    pub device: String,
    /// Whether the guest cannot write to it.
    pub is_read_only: bool,
    /// Why it cannot be copied, for the administrator.
    pub obstacle: Option<&'static str>,
    /// The format of its image; libvirt takes none for raw.
    pub format: String,
    /// The place of its bytes.
    pub source: DiskSource,
    /// Its backing files, from the upper to the lower; `None`: the definition does not list them completely.
    pub chain: Option<Vec<DiskSource>>,
    /// The copy of it that libvirt is making at present.
    pub mirror: Option<Mirror>,
}

/// A copy of a disk that libvirt is making.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// The place of the copy.
    pub to: DiskSource,
    /// Whether it has caught up, so that the disk can move there.
    pub is_ready: bool,
}

/// The place of a disk's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskSource {
    /// No place: a drive without a medium.
    None,
    /// A file on this host.
    File(PathBuf),
    /// An NBD export over a unix socket.
    Nbd(NbdSource),
    /// Another place, by libvirt's type of it.
    Other(String),
}

/// An NBD export over a unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdSource {
    /// The path of the socket.
    pub socket: PathBuf,
    /// The name of the export.
    pub export: String,
    /// How long requests wait for a lost server, in seconds; `None`: libvirt has not kept that, so they fail.
    pub reconnect_s: Option<u32>,
}

/// Returns the disks and drives of a domain, in their order.
///
/// # Errors
/// [`LibvirtError::Definition`].
pub fn disks(definition: &str) -> Result<Vec<Disk>, LibvirtError> {
    let document = parse(definition)?;
    Ok(disk_nodes(&document).filter_map(read_disk).collect())
}

/// Returns the user of a running domain's QEMU; `None`: the definition does not say.
///
/// # Errors
/// [`LibvirtError::Definition`].
pub fn qemu_user(definition: &str) -> Result<Option<u32>, LibvirtError> {
    let document = parse(definition)?;
    let labels = document.root_element().children().filter(|node| node.has_tag_name("seclabel"));
    let mut labels = labels.filter(|label| label.attribute("model") == Some("dac"));
    let label = labels.find_map(|label| child(label, "label")?.text());
    // The label is +user:+group, as numbers.
    Ok(label.and_then(|label| label.split(':').next()?.strip_prefix('+')?.parse().ok()))
}

/// Returns the `<disk>` element that makes libvirt copy a disk to an export.
pub fn disk_for_export(export: &NbdSource) -> String {
    format!(
        "<disk type='network' device='disk'><driver name='qemu' type='raw'/>{}</disk>",
        nbd_source(export)
    )
}

/// Returns the `<disk>` element that makes libvirt copy a disk to a file of that format.
pub fn disk_for_file(path: &str, format: &str) -> String {
    let (source, format) = (file_source(path), escaped(format));
    format!("<disk type='file' device='disk'><driver name='qemu' type='{format}'/>{source}</disk>")
}

/// Returns the definition with the disk `target` in a file of that format.
///
/// # Errors
/// [`LibvirtError::Definition`]: it is invalid, or has no such disk.
pub fn with_file(definition: &str, target: &str, path: &str, format: &str) -> Result<String, LibvirtError> {
    with_source(definition, target, ("file", format), &file_source(path))
}

/// Returns the definition with the disk `target` over an export.
///
/// # Errors
/// Those of [`with_file`].
pub fn with_export(definition: &str, target: &str, export: &NbdSource) -> Result<String, LibvirtError> {
    with_source(definition, target, ("network", "raw"), &nbd_source(export))
}

fn with_source(
    definition: &str,
    target: &str,
    (kind, format): (&str, &str),
    source: &str,
) -> Result<String, LibvirtError> {
    let document = parse(definition)?;
    let has_target = |node: &Node<'_, '_>| {
        child(*node, "target").and_then(|target| target.attribute("dev")) == Some(target)
    };
    let disk = disk_nodes(&document).find(has_target);
    let disk = disk.ok_or_else(|| LibvirtError::Definition(format!("it has no disk {target}")))?;
    let mut changes: Vec<(Range<usize>, String)> = Vec::new();
    let value = |node: Node<'_, '_>, name: &str| Some(node.attribute_node(name)?.range_value());
    let type_of_disk = value(disk, "type").ok_or_else(|| missing("a disk without a type"))?;
    changes.push((type_of_disk, kind.to_owned()));
    let old = child(disk, "source").ok_or_else(|| missing("a disk without a source"))?;
    changes.push((old.range(), source.to_owned()));
    match child(disk, "driver").and_then(|driver| value(driver, "type")) {
        Some(range) => changes.push((range, escaped(format))),
        None => return Err(missing("a disk whose driver has no type")),
    }
    // The old image's backing files do not concern the new one.
    changes.extend(child(disk, "backingStore").map(|chain| (chain.range(), String::new())));
    changes.sort_by_key(|(range, _)| std::cmp::Reverse(range.start));
    let mut changed = definition.to_owned();
    for (range, text) in changes {
        changed.replace_range(range, &text);
    }
    Ok(changed)
}

fn missing(what: &str) -> LibvirtError {
    LibvirtError::Definition(format!("it has {what}"))
}

fn parse(definition: &str) -> Result<Document<'_>, LibvirtError> {
    let options = ParsingOptions { nodes_limit: NODES_MAX, ..ParsingOptions::default() };
    Document::parse_with_options(definition, options)
        .map_err(|error| LibvirtError::Definition(error.to_string()))
}

fn disk_nodes<'a, 'input>(document: &'a Document<'input>) -> impl Iterator<Item = Node<'a, 'input>> {
    let devices = child(document.root_element(), "devices");
    devices.into_iter().flat_map(|devices| devices.children().filter(|node| node.has_tag_name("disk")))
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn read_disk(disk: Node<'_, '_>) -> Option<Disk> {
    let has = |name: &str| child(disk, name).is_some();
    let source = child(disk, "source");
    let in_source = |name: &str| source.is_some_and(|source| child(source, name).is_some());
    let obstacle = if has("shareable") {
        Some("it is shared with other domains (<shareable/>)")
    } else if has("transient") {
        Some("it forgets what is written (<transient/>)")
    } else if has("encryption") || in_source("encryption") {
        Some("it is encrypted, and its copy would not be")
    } else if in_source("slices") {
        Some("it is a part of its image (<slices>)")
    } else {
        None
    };
    let driver = child(disk, "driver");
    let mirror = child(disk, "mirror").map(|mirror| Mirror {
        to: read_source(mirror.attribute("type"), child(mirror, "source")),
        is_ready: mirror.attribute("ready") == Some("yes"),
    });
    Some(Disk {
        target: child(disk, "target")?.attribute("dev")?.to_owned(),
        device: disk.attribute("device").unwrap_or("disk").to_owned(),
        is_read_only: has("readonly"),
        obstacle,
        format: driver.and_then(|driver| driver.attribute("type")).unwrap_or("raw").to_owned(),
        source: read_source(disk.attribute("type"), source),
        chain: read_chain(disk),
        mirror,
    })
}

fn read_chain(disk: Node<'_, '_>) -> Option<Vec<DiskSource>> {
    let mut chain = Vec::new();
    let mut below = child(disk, "backingStore")?;
    while let Some(source) = child(below, "source") {
        chain.push(read_source(below.attribute("type"), Some(source)));
        below = child(below, "backingStore")?;
    }
    Some(chain)
}

/// Returns whether a definition names a socket anywhere except as the source or copy of the disk `target`: in another disk, in a
/// backing file, among QEMU's own arguments.
///
/// # Errors
/// [`LibvirtError::Definition`].
pub fn mentions_beside(definition: &str, target: &str, socket: &Path) -> Result<bool, LibvirtError> {
    let document = parse(definition)?;
    let socket = socket.to_string_lossy();
    let own: Vec<Range<usize>> = disk_nodes(&document)
        .filter(|disk| child(*disk, "target").and_then(|target| target.attribute("dev")) == Some(target))
        .flat_map(|disk| {
            ["source", "mirror", "backingStore"].into_iter().filter_map(move |name| child(disk, name))
        })
        .map(|node| node.range())
        .collect();
    let is_named = |node: Node<'_, '_>| {
        let in_attributes = node.attributes().any(|attribute| attribute.value().contains(&*socket));
        in_attributes || node.is_text() && node.text().is_some_and(|text| text.contains(&*socket))
    };
    let is_beside = |node: &Node<'_, '_>| !own.iter().any(|range| range.contains(&node.range().start));
    Ok(document.descendants().filter(is_beside).any(is_named))
}

fn read_source(kind: Option<&str>, source: Option<Node<'_, '_>>) -> DiskSource {
    let Some(source) = source else { return DiskSource::None };
    let kind = kind.unwrap_or("file");
    let nbd = || {
        let host = child(source, "host").filter(|host| host.attribute("transport") == Some("unix"))?;
        let reconnect = child(source, "reconnect").and_then(|node| node.attribute("delay"));
        Some(DiskSource::Nbd(NbdSource {
            socket: PathBuf::from(host.attribute("socket")?),
            export: source.attribute("name").unwrap_or_default().to_owned(),
            reconnect_s: reconnect.and_then(|seconds| seconds.parse().ok()),
        }))
    };
    match (kind, source.attribute("file"), source.attribute("protocol")) {
        ("file", Some(file), _) => DiskSource::File(Path::new(file).to_owned()),
        ("file", None, _) => DiskSource::None,
        ("network", _, Some("nbd")) => nbd().unwrap_or_else(|| DiskSource::Other("nbd".to_owned())),
        ("network", _, Some(protocol)) => DiskSource::Other(protocol.to_owned()),
        (kind, ..) => DiskSource::Other(kind.to_owned()),
    }
}

fn file_source(path: &str) -> String {
    format!("<source file='{}'/>", escaped(path))
}

/// Older libvirt leaves out how long requests wait.
fn nbd_source(NbdSource { socket, export, reconnect_s }: &NbdSource) -> String {
    let socket = escaped(&socket.to_string_lossy());
    let reconnect = reconnect_s.map(|seconds| format!("<reconnect delay='{seconds}'/>")).unwrap_or_default();
    format!(
        "<source protocol='nbd' name='{}'><host transport='unix' socket='{socket}'/>{reconnect}</source>",
        escaped(export)
    )
}

fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '\'' => escaped.push_str("&apos;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As libvirt 9.0 writes it while it copies a disk.
    const COPIED: &str = "<domain type='kvm' id='1'><name>web1</name><devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none'/>
      <source file='/srv/a &amp; b.qcow2' index='1'/>
      <backingStore type='file'><format type='raw'/><source file='/srv/base.img'/></backingStore>
      <mirror type='network' job='copy' ready='yes'>
        <format type='raw'/>
        <source protocol='nbd' name='web1' tls='no' index='2'><host transport='unix' socket='/run/v/web1.sock'/></source>
      </mirror>
      <target dev='vda' bus='virtio'/>
    </disk>
    <disk type='file' device='cdrom'><target dev='sda' bus='sata'/><readonly/></disk>
    <disk type='block' device='disk'><source dev='/dev/vg/a'/><target dev='vdb'/><shareable/></disk>
    <graphics type='vnc' passwd='secret'/></devices>
    <seclabel type='dynamic' model='apparmor'><label>libvirt-1</label></seclabel>
    <seclabel type='dynamic' model='dac' relabel='yes'><label>+64055:+108</label></seclabel></domain>";

    fn export() -> NbdSource {
        NbdSource { socket: "/run/v/web1.sock".into(), export: "web1".to_owned(), reconnect_s: None }
    }

    #[test]
    fn disks_and_their_copies_are_read() {
        let [disk, drive, block] = disks(COPIED).unwrap().try_into().unwrap();
        assert_eq!((disk.target.as_str(), disk.format.as_str()), ("vda", "qcow2"));
        assert_eq!(disk.source, DiskSource::File("/srv/a & b.qcow2".into()));
        assert_eq!(disk.mirror, Some(Mirror { to: DiskSource::Nbd(export()), is_ready: true }));
        assert_eq!((drive.source, drive.device.as_str()), (DiskSource::None, "cdrom"));
        assert!(drive.is_read_only && disk.obstacle.is_none());
        assert_eq!(block.source, DiskSource::Other("block".to_owned()));
        assert!(block.obstacle.unwrap().contains("shared"));
        assert_eq!(qemu_user(COPIED).unwrap(), Some(64055));
        assert!(matches!(disks("<domain>"), Err(LibvirtError::Definition(_))));
    }

    #[test]
    fn what_a_disk_stands_on_is_told_only_if_the_chain_has_an_end() {
        let chain_of = |below: &str| {
            let disk = format!(
                "<domain><devices><disk type='file'><source file='/top'/><target dev='vda'/>{below}</disk></devices></domain>"
            );
            disks(&disk).unwrap().remove(0).chain
        };
        let nbd = nbd_source(&export());
        let end = "<backingStore/>";
        assert_eq!(chain_of(""), None);
        assert_eq!(chain_of(end), Some(Vec::new()));
        let over =
            |end: &str| format!("<backingStore type='network'><format type='raw'/>{nbd}{end}</backingStore>");
        assert_eq!(chain_of(&over(end)), Some(vec![DiskSource::Nbd(export())]));
        assert_eq!(chain_of(&over("")), None);
    }

    #[test]
    fn a_socket_is_seen_wherever_a_definition_names_it() {
        let socket = &export().socket;
        let other = |place: &str| {
            format!(
                "<domain><devices><disk type='network'>{}<target dev='vda'/></disk>{place}</devices></domain>",
                nbd_source(&export())
            )
        };
        assert!(!mentions_beside(&other(""), "vda", socket).unwrap());
        assert!(mentions_beside(&other(""), "vdb", socket).unwrap());
        let second = format!("<disk type='network'>{}<target dev='vdb'/></disk>", nbd_source(&export()));
        let places = [
            second,
            format!("<qemu:arg value='file=nbd:unix:{}'/>", socket.display()),
            format!("<note>{}</note>", socket.display()),
        ];
        for place in places {
            let place = place.replace("qemu:", "");
            assert!(mentions_beside(&other(&place), "vda", socket).unwrap(), "{place}");
        }
    }

    #[test]
    fn only_the_source_of_one_disk_is_written_anew() {
        let export = NbdSource { reconnect_s: Some(60), ..export() };
        let changed = with_export(COPIED, "vda", &export).unwrap();
        let disk = disks(&changed).unwrap().remove(0);
        assert_eq!((disk.source, disk.format.as_str()), (DiskSource::Nbd(export), "raw"));
        assert!(!changed.contains("base.img") && changed.contains("passwd='secret'"));
        let back = with_file(&changed, "vda", "/srv/it's.img", "qcow2").unwrap();
        let disk = disks(&back).unwrap().remove(0);
        assert_eq!((disk.source, disk.format.as_str()), (DiskSource::File("/srv/it's.img".into()), "qcow2"));
        let tail = |text: &str| text[text.find("<target").unwrap()..].to_owned();
        assert_eq!(tail(&back), tail(COPIED));
        assert!(with_file(COPIED, "vdz", "/a", "raw").is_err());
    }

    #[test]
    fn what_libvirt_is_asked_for_is_what_it_says_then() {
        let wanted = disk_for_export(&NbdSource { reconnect_s: Some(60), ..export() });
        let document = parse(&wanted).unwrap();
        let source = read_source(Some("network"), child(document.root_element(), "source"));
        assert_eq!(source, DiskSource::Nbd(NbdSource { reconnect_s: Some(60), ..export() }));
        assert_eq!(
            disk_for_file("/a'b", "raw"),
            "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='/a&apos;b'/></disk>"
        );
    }
}
