//! What one side encodes, the other decodes.

use proptest::prelude::*;

use super::*;
use crate::allocation;

/// The replies that `says` makes to `GO`: kind and data of each.
fn replies(says: impl FnOnce(&mut OptionReplies<'_>)) -> Vec<(u32, Vec<u8>)> {
    let mut output = Vec::new();
    says(&mut OptionReplies::new(&mut output, number::GO));
    let (mut rest, mut found) = (&output[..], Vec::new());
    while let Some((header, behind)) = rest.split_first_chunk() {
        let header = OptionReplyHeader::decode(header).unwrap();
        assert_eq!(header.option, number::GO);
        let (data, behind) = behind.split_at(header.length as usize);
        found.push((header.kind, data.to_vec()));
        rest = behind;
    }
    assert_eq!(rest, b"");
    found
}

#[test]
fn an_option_is_encoded_as_the_protocol_says() {
    let data = InfoRequest::encode("disk", &[info::BLOCK_SIZE]);
    let go = [&b"IHAVEOPT"[..], &[0, 0, 0, 7, 0, 0, 0, 12, 0, 0, 0, 4], b"disk", &[0, 1, 0, 3]].concat();
    assert_eq!(encode_option(number::GO, &data), go);
    let header = OptionHeader { option: number::GO, length: 12 };
    assert_eq!(OptionHeader::decode(&go), Ok(Some(header)));
    assert_eq!(OptionHeader::decode(&go[..15]), Ok(None));
    assert!(OptionHeader::decode(&[0; 16]).is_err());
    let Ok(OptionRequest::Go(request)) = decode_option(number::GO, &data) else { panic!("GO is understood") };
    assert!(request.name == "disk" && request.wants(info::BLOCK_SIZE) && !request.wants(info::NAME));
}

#[test]
fn a_greeting_is_understood_and_another_one_is_named() {
    let mut output = Vec::new();
    encode_greeting(&mut output);
    assert_eq!(output, b"NBDMAGICIHAVEOPT\0\x03");
    let greeting: [u8; GREETING_LENGTH] = output.try_into().unwrap();
    assert_eq!(decode_greeting(&greeting), Ok(3));
    for at in [0, 8, 17] {
        let mut wrong = greeting;
        wrong[at] = 0;
        assert!(decode_greeting(&wrong).is_err(), "byte {at}");
    }
}

#[test]
fn every_reply_of_a_server_is_understood_by_a_client() {
    let export = ExportInfo { size: 1 << 40, flags: 0x0541 };
    let sizes = BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 };
    let said = replies(|replies| {
        replies.info_export(export);
        replies.info_block_sizes(sizes);
        replies.info_text(info::NAME, "disk");
        replies.meta_context(7, allocation::NAME);
        replies.server("disk", "a disk");
        replies.acknowledge();
    });
    let infos: Vec<_> = said[..3].iter().map(|(_, data)| Info::decode(data)).collect();
    assert_eq!(infos, [Ok(Info::Export(export)), Ok(Info::BlockSizes(sizes)), Ok(Info::Other)]);
    assert_eq!(decode_meta_context(&said[3].1), Some((7, allocation::NAME.as_bytes())));
    assert_eq!(said[4], (option_reply::SERVER, b"\0\0\0\x04diska disk".to_vec()));
    assert_eq!(said[5], (option_reply::ACK, Vec::new()));
    for (padding, length) in [(Padding::Left, 10), (Padding::Sent, 134)] {
        let mut output = Vec::new();
        export.encode(padding, &mut output);
        assert_eq!((output.len(), ExportInfo::decode(&output)), (length, Some(export)));
    }
}

#[test]
fn text_that_is_too_long_or_none_is_refused() {
    let long = "x".repeat(crate::STRING_LENGTH_MAX + 1);
    for name in [long.as_str(), "a\0b"] {
        assert_eq!(decode_option(number::GO, &InfoRequest::encode(name, &[])), Err(Malformed));
        assert_eq!(decode_option(number::EXPORT_NAME, name.as_bytes()), Err(Malformed));
    }
    // A count that no data follows reserves nothing.
    let counted = [&[0, 0, 0, 0][..], &u32::MAX.to_be_bytes()].concat();
    assert_eq!(decode_option(number::SET_META_CONTEXT, &counted), Err(Malformed));
}

proptest! {
    #[test]
    fn contexts_that_are_asked_for_are_understood(export in "[a-z]{0,20}", queries in proptest::collection::vec("[a-z:]{0,20}", 0..5)) {
        let request = MetaContextRequest { export: &export, queries: queries.iter().map(String::as_str).collect() };
        let data = request.encode();
        prop_assert_eq!(decode_option(number::SET_META_CONTEXT, &data), Ok(OptionRequest::SetMetaContext(request)));
    }

    #[test]
    fn no_bytes_make_a_decoder_panic(option in 0_u32..14, data in proptest::collection::vec(any::<u8>(), 0..64)) {
        let _ = (decode_option(option, &data), OptionHeader::decode(&data), Info::decode(&data));
        let _ = (decode_meta_context(&data), ExportInfo::decode(&data));
    }
}
