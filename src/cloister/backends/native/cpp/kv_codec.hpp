// The codec for KV below the device (decisions/0040): numbers become integers, which rANS codes with static models.
//
// `backends/kv_codec.py` describes the stream, and codes it in numpy: both come to the same bytes and the same numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cloister {

// Numbers of some positions and channels, somewhere in the contents of a block. A position t lies at
// (t / inner_tokens) * token_stride + (t % inner_tokens) * inner_token_stride numbers from the first one; a channel likewise.
struct KVPlane {
    size_t offset;      // bytes before its first number
    int number_bytes;   // 2: bfloat16, 4: float32
    int num_tokens, inner_tokens, num_channels, inner_channels;
    size_t token_stride, inner_token_stride, channel_stride, inner_channel_stride;

    size_t num_numbers() const { return size_t(num_tokens) * size_t(num_channels); }
    size_t at(int t, int c) const {
        return size_t(t / inner_tokens) * token_stride + size_t(t % inner_tokens) * inner_token_stride +
               size_t(c / inner_channels) * channel_stride + size_t(c % inner_channels) * inner_channel_stride;
    }
};

class KVCodec {
public:
    static constexpr int num_symbols = 64, num_contexts = 24, scale_bits = 12, num_lanes = 16;

    // `frequencies` [num_contexts][num_symbols], each row sums to 2^scale_bits and has no zero; `content_bytes` are those of the planes.
    // Throws std::invalid_argument where they do not fit each other.
    KVCodec(const uint16_t* frequencies, std::vector<KVPlane> planes, size_t content_bytes);

    size_t content_bytes() const { return content_bytes_; }
    size_t num_planes() const { return planes_.size(); }

    // Writes a stream and returns its bytes; 0 where `room` is too small. A plane whose step is 0, or whose numbers are not finite, comes
    // back as it is; else numbers come back as multiples of its step times the root mean square of their distance from their channel's mean.
    // A position whose numbers are much smaller than the others' halves that step, up to seven times.
    size_t encode(const uint8_t* content, const float* steps, uint8_t* out, size_t room) const;

    // Reads a stream; returns false, and leaves any numbers, where it is not one of these planes. Never reads or writes elsewhere.
    // With and without vectors it comes to the same.
    bool decode(const uint8_t* stream, size_t size, uint8_t* content, bool is_plain = false) const;

private:
    bool decode_plain(const uint8_t* stream, size_t size, uint8_t* content) const;
    bool decode_vectors(const uint8_t* stream, size_t size, uint8_t* content) const;

    std::vector<KVPlane> planes_;
    size_t content_bytes_, most_channels_ = 0, most_tokens_ = 0, most_numbers_ = 0, num_numbers_ = 0;
    std::vector<uint32_t> starts_, entries_;  // of the encoder: frequency and start of each symbol; of the decoder: what each slot means
};

}  // namespace cloister
