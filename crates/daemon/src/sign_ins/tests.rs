//! Tests of keys and tokens over time.

use super::*;

const OWNER: Owner = Owner::Remote(HostId([7; 32]));

#[test]
fn a_key_works_once_and_its_token_until_it_is_given_back() {
    let (sign_ins, now) = (SignIns::default(), Instant::now());
    let key = sign_ins.invite(OWNER, now).unwrap();
    assert_eq!(sign_ins.owner(&key, now), None, "a key is no token");
    let token = sign_ins.sign_in(&key, now).unwrap();
    assert_eq!(sign_ins.sign_in(&key, now), None);
    assert_eq!(sign_ins.sign_in(&token, now), None, "a token is no key");
    assert_eq!(sign_ins.owner(&token, now), Some(OWNER));
    for other in ["", "0", &token[1..], &token.to_uppercase()] {
        assert_eq!(sign_ins.owner(other, now), None, "{other}");
    }
    sign_ins.sign_out(&token);
    assert_eq!(sign_ins.owner(&token, now), None);
}

#[test]
fn keys_and_tokens_end_with_their_time() {
    let (sign_ins, now) = (SignIns::default(), Instant::now());
    let (early, late) = (sign_ins.invite(OWNER, now).unwrap(), sign_ins.invite(OWNER, now).unwrap());
    let token = sign_ins.sign_in(&early, now + KEY_LIFETIME - Duration::from_millis(1)).unwrap();
    assert_eq!(sign_ins.sign_in(&late, now + KEY_LIFETIME), None);
    assert_eq!(sign_ins.owner(&token, now + SESSION_LIFETIME), Some(OWNER));
    assert_eq!(sign_ins.owner(&token, now + SESSION_LIFETIME + KEY_LIFETIME), None);
}

#[test]
fn many_links_use_bounded_memory_and_the_newest_works() {
    let (sign_ins, now) = (SignIns::default(), Instant::now());
    let keys: Vec<_> = (0..EACH_MAX + 5).map(|_| sign_ins.invite(OWNER, now).unwrap()).collect();
    assert_eq!(sign_ins.lists().keys.len(), EACH_MAX);
    assert_eq!(sign_ins.sign_in(&keys[0], now), None);
    assert!(sign_ins.sign_in(&keys[EACH_MAX + 4], now).is_some());
}
