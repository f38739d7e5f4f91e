//! The file store on both engines, on disk and in memory.

use block::engine::{self, EngineChoice};
use block::{
    BlockDevice, Buffer, ByteRange, Durability, Executor, ExtentKind, FileStore, Image, IoError, ZeroMode,
};

#[test]
fn a_file_store_does_what_it_is_asked_on_both_engines_and_odd_sizes() {
    for (choice, size) in [EngineChoice::Ring, EngineChoice::Threads]
        .into_iter()
        .flat_map(|c| [(c, 1 << 20), (c, (1 << 20) + 700)])
    {
        let Ok((driver, engine)) = engine::open(choice) else { continue };
        let folder = tempfile::tempdir_in(".").unwrap();
        let image = Image::create(&folder.path().join("disk"), size).unwrap();
        let store = FileStore::new(image, engine);
        Executor::new(driver).run(async move {
            let data = Buffer::copy_of(&[5; 8192]);
            store.write(4096, data.clone(), Durability::Durable).await.unwrap();
            let read = store.read(4096, Buffer::zeroed(8192)).await.unwrap();
            assert_eq!(read.as_slice(), data.as_slice());
            let end = size - size % 4096 - 4096;
            let rest = Buffer::copy_of(&vec![6; (size - end) as usize]);
            store.write(end, rest.clone(), Durability::Durable).await.unwrap();
            let read = store.read(end, Buffer::zeroed(rest.len())).await.unwrap();
            assert_eq!(read.as_slice(), rest.as_slice());
            assert!(matches!(store.read(size, Buffer::zeroed(1)).await, Err(IoError::OutOfRange { .. })));
            store
                .write_zeroes(ByteRange::new(4096, 4096), ZeroMode::KeepAllocated, Durability::Durable)
                .await
                .unwrap();
            store.discard(ByteRange::new(8192, 4096)).await.unwrap();
            assert!(store.read(4096, Buffer::zeroed(8192)).await.unwrap().is_zero());
            let extents = store.allocation(ByteRange::new(0, size)).await.unwrap();
            assert_eq!(extents[0].kind, ExtentKind::Hole);
            assert_eq!(extents.last().unwrap().range.end(), size);
            store.flush().await.unwrap();
        });
    }
}
