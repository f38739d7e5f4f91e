//! Tests of a user's image that is served in place, then moved into a store while its guest works.

use std::num::NonZeroU64;
use std::path::Path;

use anyhow::{Context as _, ensure};
use api::Volume;
use e2e::{Host, guest, play};
use lab::workload::{self, Content, Guest, GuestOptions};
use testbed::nbd_client::{Client, ClientOptions};

const DISK_BYTES: u64 = 32 << 20;

#[test]
fn adopted_image_moves_into_a_store_and_the_original_is_kept_as_it_was() {
    play(|scene| {
        let image = scene.path("disk.raw");
        std::fs::File::create(&image)?.set_len(DISK_BYTES)?;
        let path = image.to_str().context("a path")?;
        let volume: Volume = scene.ask(&["volume", "add", "v", "--image", path])?;
        ensure!(volume.store.is_none() && Path::new(&volume.image) == image.canonicalize()?, "{volume:?}");

        // The guest has ended its work, so the original's content is known.
        let address = scene.export()?;
        let mut client = Client::connect(&address, ClientOptions::default())?;
        let mut content = Content::new(DISK_BYTES, guest::BLOCK_BYTES, 1);
        workload::fill(&mut client, &mut content, DISK_BYTES / 2, |_| {})?;
        let requests_max = NonZeroU64::new(3000);
        let options = GuestOptions { requests_max, ..GuestOptions::default() };
        let rested = guest::rest(Guest::start(client, content, options)?)?;
        scene.migrate("b")?;
        check_fenced(scene, &rested.content)?;

        // The original stays unchanged from here on.
        let rested_content = rested.content.clone();
        let guest = Guest::start(rested.client, rested.content, GuestOptions::default())?;
        scene.migrate("a")?;
        guest::stop_and_verify(guest)?;
        check_fenced(scene, &rested_content)
    });
}

/// Checks that the original was renamed, with its content unchanged.
fn check_fenced(scene: &Host, content: &Content) -> anyhow::Result<()> {
    ensure!(!scene.path("disk.raw").exists(), "something could start from the original");
    guest::verify_image(&scene.path("disk.raw.moved-m0"), content)
}
