//! Tests graphs of nodes as QEMU reports them, and impossible ones.

use super::*;

fn graph(edges: &[(u64, u64)], nodes: &[(u64, &str, &str, &str)]) -> Graph {
    let vertices: Vec<_> =
        nodes.iter().map(|(id, name, ..)| json!({"id": id, "name": name, "type": "block-driver"})).collect();
    let edges: Vec<_> = edges
        .iter()
        .map(|(parent, child)| json!({"parent": parent, "child": child, "name": "file"}))
        .collect();
    let named: Vec<_> = nodes
        .iter()
        .map(|(_, name, driver, file)| json!({"node-name": name, "drv": driver, "file": file}))
        .collect();
    Graph::read(&json!({"nodes": vertices, "edges": edges}), &named).unwrap()
}

fn volume() -> Leaf {
    Leaf::Export { socket: "/run/v.sock".into(), name: "v".to_owned() }
}

#[test]
fn an_overlay_is_seen_with_what_it_stands_on() {
    let nbd = "nbd+unix:///v?socket=/run/v.sock";
    let graph = graph(
        &[(1, 2), (1, 3)],
        &[(1, "ov", "qcow2", "/ov"), (2, "#file", "file", "/ov"), (3, "root", "nbd", nbd)],
    );
    let (leaves, drivers) = graph.below("ov").unwrap();
    assert_eq!(leaves, BTreeSet::from([volume(), Leaf::File("/ov".to_owned())]));
    assert_eq!(drivers, ["file", "nbd", "qcow2"].map(str::to_owned).into());
}

#[test]
fn a_filter_is_seen_wherever_it_is() {
    let nbd = r#"json:{"server.path": "/run/v.sock", "export": "v", "driver": "nbd"}"#;
    let graph = graph(
        &[(1, 2), (2, 3)],
        &[(1, "top", "raw", nbd), (2, "slow", "throttle", nbd), (3, "low", "nbd", nbd)],
    );
    let (leaves, drivers) = graph.below("top").unwrap();
    assert_eq!(leaves, BTreeSet::from([volume()]));
    assert!(drivers.contains("throttle"));
}

#[test]
fn a_graph_that_cannot_be_is_an_error_and_ends() {
    let alone = [(1, "a", "raw", "")];
    assert!(graph(&[], &alone).below("b").is_err());
    let dangling = json!({"nodes": [{"id": 1, "name": "a", "type": "block-driver"}], "edges": [{"parent": 1, "child": 2}]});
    assert!(Graph::read(&dangling, &[json!({"node-name": "a", "drv": "raw"})]).is_err());
    // A cycle: it ends, without a leaf that could be a volume.
    assert!(
        graph(&[(1, 2), (2, 1)], &[(1, "a", "raw", ""), (2, "b", "raw", "")])
            .below("a")
            .unwrap()
            .0
            .is_empty()
    );
    assert!(Graph::read(&json!([]), &[]).is_err());
    assert!(Graph::read(&json!({"nodes": vec![0; THINGS_MAX + 1], "edges": []}), &[]).is_err());
}

#[test]
fn a_device_is_known_by_its_name_in_every_spelling() {
    let name = |device: &str| {
        let drive = SeenDrive { device: device.to_owned(), ..SeenDrive::default() };
        drive.device_name().map(str::to_owned)
    };
    assert_eq!(name("/machine/peripheral/vdb/virtio-backend").as_deref(), Some("vdb"));
    assert_eq!(name("cd0").as_deref(), Some("cd0"));
    assert_eq!(name("/machine/peripheral-anon/device[0]/virtio-backend"), None);
    assert_eq!(name(""), None);
}
